"use strict";
// The page: sends pictures to /predict and shows what comes back. Names are only ever set as text.

const at = (id) => document.getElementById(id);
const percent = (share) => (share === null ? "–" : (100 * share).toFixed(1) + "%");

function element(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

async function ask(path, options) {
  const response = await fetch(path, options);
  const body = await response.json();
  if (!response.ok && !body.predictions) throw new Error(body.error);
  return body;
}

async function guarded(work) {
  at("message").textContent = "";
  try {
    await work();
  } catch (error) {
    at("message").textContent = error.message;
  }
}

// Pictures.

function send(files) {
  const pictures = [...files];
  if (!pictures.length) return;
  guarded(async () => {
    const form = new FormData();
    for (const picture of pictures) form.append("files", picture, picture.name || "picture");
    const { predictions } = await ask("/predict?top=5", { method: "POST", body: form });
    predictions.forEach((prediction, n) => at("answers").prepend(shown(prediction, pictures[n])));
  });
}

function shown(prediction, picture) {
  const item = element("li");
  const image = element("img");
  image.alt = prediction.file;
  image.src = URL.createObjectURL(picture);
  image.onload = image.onerror = () => URL.revokeObjectURL(image.src);
  const told = element("div");
  told.append(element("div", prediction.file, "file"));
  if (prediction.error) {
    told.append(element("div", prediction.error));
  } else {
    for (const answer of prediction.answers) {
      const line = element("div");
      const bar = element("meter");
      bar.value = answer.probability ?? 0;
      line.append(bar, ` ${percent(answer.probability)} ${answer.class}${answer.new ? " (new)" : ""}`);
      told.append(line);
    }
    if (prediction.before) {
      const [best] = prediction.before;
      told.append(element("div", `before: ${best.class} ${percent(best.probability)}`, "aside"));
      const shares = prediction.branches.map((b) => `${b.branch} ${percent(b.share)} (${b.top[0].class})`);
      told.append(element("div", `branches: ${shares.join(", ")}`, "aside"));
    }
  }
  item.append(image, told);
  return item;
}

at("files").addEventListener("change", (event) => {
  send(event.target.files);
  event.target.value = "";
});
document.addEventListener("paste", (event) => send(event.clipboardData.files));
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    at("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop") send(event.dataTransfer.files);
  });
}

// The dial.

function turned(point) {
  at("dial").hidden = point === null;
  if (point === null) return;
  at("goal").value = point.goal;
  const figures = Object.entries(point.accuracies ?? {}).filter(([, value]) => value !== null);
  at("point").textContent = figures.map(([name, value]) => `${name} ${percent(value)}`).join(", ");
}

at("goal").addEventListener("change", () =>
  guarded(async () => {
    const body = JSON.stringify({ goal: at("goal").value });
    turned((await ask("/operating-point", { method: "PUT", body })).operating_point);
  }),
);

// What is served, and what is being made.

async function describe() {
  const model = await ask("/model");
  document.title = at("name").textContent = model.name;
  const fresh = model.classes.filter((each) => each.new).length;
  at("about").textContent = `${model.classes.length} classes${fresh ? `, ${fresh} of them new` : ""}`;
  turned(model.operating_point);
}

async function watch() {
  if ((await ask("/progress")).state === "none") return;
  const events = new EventSource("/progress/events");
  events.onmessage = (event) => {
    const { out, state, works } = JSON.parse(event.data);
    const now = works.at(-1);
    at("progress").hidden = false;
    at("progress").textContent = `${out}: ${state}` + (now ? `, ${now.work} ${now.done} of ${now.total}` : "");
    if (state === "finished") {
      events.close();
      setTimeout(() => guarded(describe), 2000);
    }
  };
}

guarded(describe);
watch();
