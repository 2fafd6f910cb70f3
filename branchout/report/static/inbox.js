// The inbox: shows what /inbox/state says, and sends what is decided. Everything is kept by the server.
"use strict";

const POLL = 1000; // milliseconds between two looks at the state
const MOST = 400; // photos of one request
const byId = (id) => document.getElementById(id);
const drawn = {}; // what each part of the page was last drawn from, as JSON text
let state = null;
let changes = 0; // begun or ended: an answer to a question from before one is outdated
let news = ""; // said before the summary once another model is served

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("data-") || name.startsWith("aria-") || name === "list") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

const button = (text, act) => element("button", { type: "button", textContent: text, onclick: act });
const photos = (count) => (count === 1 ? "1 photo" : `${count} photos`);
const classes = (count) => (count === 1 ? "1 class" : `${count} classes`);
const percent = (share) => (100 * share).toFixed(1);
const ids = (list) => list.map((each) => each.photo);

// Talking to the server.

async function ask(path, body, method = "POST") {
  const options = body && { method, headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const response = await fetch(path, options);
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.error), { similar: answer.similar });
  return answer;
}

function complain(text) {
  byId("message").hidden = !text;
  byId("message").textContent = text;
}

// `all` are the photos that are meant, where a request holds only some of them.
async function change(path, body, method = "POST", all = body.photos) {
  changes += 1;
  try {
    const answer = await ask(path, body, method);
    show(answer);
    complain(answer.error ?? "");
    return true;
  } catch (error) {
    if (error.similar) askSimilar({ ...body, photos: all }, error);
    else complain(error.message);
    return false;
  } finally {
    changes += 1;
  }
}

// `more` is the class of the action "name", or when the decision was made that "undo" is about.
async function decide(chosen, action, more = {}) {
  const next = after(chosen);
  for (let start = 0; start < chosen.length; start += MOST) {
    const part = { photos: chosen.slice(start, start + MOST), action, ...more };
    if (!(await change("/inbox/decisions", part, "POST", chosen))) return;
  }
  focusPhoto(action === "undo" ? chosen[0] : next);
}

// Another spelling of a class: the person says which of the two is meant.
async function askSimilar(choice, error) {
  byId("similar-text").textContent = error.message;
  byId("similar-known").textContent = `Use ${error.similar}`;
  byId("similar-new").textContent = `New class ${choice.class}`;
  const answer = await answered(byId("similar"));
  if (answer === "known") decide(choice.photos, "name", { class: error.similar });
  else if (answer === "new") decide(choice.photos, "name", { class: choice.class, new_class: true });
  else focusField(choice.photos);
}

function answered(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue), { once: true }));
}

async function poll() {
  try {
    const before = changes;
    const found = await ask("/inbox/state");
    if (before === changes) show(found);
  } catch (error) {
    byId("summary").textContent = `The server does not answer: ${error.message}`;
    drawn.summary = null;
  }
  setTimeout(poll, document.hidden ? 5 * POLL : POLL);
}

async function listClasses() {
  const found = await ask("/classes?limit=5000");
  byId("known").replaceChildren(...found.classes.map((each) => element("option", { value: each.class })));
}

// Photos and groups.

function picture(photo, caption) {
  const image = element("img", { src: `/inbox/photo/${photo.photo}`, alt: photo.file, loading: "lazy" });
  image.onload = () => image.classList.toggle("small", image.naturalWidth <= 64);
  const open = element("button", { type: "button", className: "photo", "data-photo": photo.photo, title: photo.file }, image);
  open.onclick = () => openDialog(photo.photo);
  open.setAttribute("aria-label", `${photo.file}: send to a class`);
  return element("li", {}, element("figure", {}, open, element("figcaption", {}, caption)));
}

function guess(photo) {
  return element("span", { title: photo.file }, element("bdi", { textContent: photo.answer }), ` ${percent(photo.probability)}%`);
}

function groupOf(members, number, typed) {
  const input = element("input", { autocomplete: "off", maxLength: 120, required: true, list: "known", value: typed });
  const form = element("form", { className: "controls" },
    element("label", {}, "Class ", input),
    element("button", { textContent: `Name ${photos(members.length)}` }),
    button("Dismiss", () => decide(ids(members), "dismiss")));
  form.onsubmit = (event) => {
    event.preventDefault();
    decide(ids(members), "name", { class: input.value });
  };
  return element("article", { className: "group", "aria-label": `Group ${number + 1}` },
    element("h3", {}, `Group ${number + 1}`, element("small", { textContent: ` ${photos(members.length)}` })),
    element("ul", { className: "photos" }, ...members.map((each) => picture(each, guess(each)))), form);
}

function namedClass(each) {
  const undo = (decision) => button("Undo", () => decide([decision.photo], "undo"));
  const about = each.missing ? `needs ${each.missing} more to be taught` : each.known ? "a class the model knows" : "a new class";
  return element("article", { className: "group" },
    element("h3", {}, element("bdi", { textContent: each.class }), element("small", { textContent: ` ${photos(each.photos.length)}, ${about}` })),
    element("ul", { className: "photos" }, ...each.photos.map((decision) => picture(decision, undo(decision)))));
}

// The run.

const worse = (part) => part.before !== null && part.after < part.before;

function resultTable(result) {
  const cell = (text, name = "") => element("td", { className: `number ${name}`.trim(), textContent: text });
  const rows = result.parts.map((part) => {
    const points = part.before === null ? "new" : (part.after > part.before ? "+" : worse(part) ? "\u2212" : "±") + Math.abs(part.after - part.before);
    const sign = part.before === null || part.after === part.before ? "" : worse(part) ? "down" : "up";
    return element("tr", {}, element("th", { scope: "row", textContent: part.title }), cell(part.images),
      cell(part.before ?? "–"), cell(part.after), cell(points, sign));
  });
  const heads = ["classes", "images", "right before", "right after", "change"].map((text, n) =>
    element("th", { scope: "col", textContent: text, className: n ? "number" : "" }));
  const source = result.measured_on === "test" ? "test images, and on photos that did not train" : "images that did not train; they helped to choose the operating point";
  return element("table", {}, element("caption", { textContent: `Counted on ${source}.` }),
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
}

function resultOf(run) {
  const { result } = run;
  const right = `${result.photos_right} of the ${photos(result.photos)} are classified correctly; nearly all of them were used to train.`;
  return [element("p", { className: result.parts.some(worse) ? "warn" : "", textContent: run.verdict }),
    result.parts.length ? element("div", { className: "scroll" }, resultTable(result)) : "", element("p", { textContent: right }),
    ...result.warnings.map((line) => element("p", { className: "note", textContent: line }))].filter((each) => each !== "");
}

function work(each) {
  const bar = element("progress", { max: each.total, value: each.done });
  bar.setAttribute("aria-label", each.work);
  return element("li", {}, element("span", { textContent: each.work }), bar,
    element("span", { className: "number", textContent: `${each.done} of ${each.total}` }));
}

const RUN = {
  running: ["Teaching", "This goes on when you close the page.", [["Stop", "stop"]]],
  stopped: ["Teaching was stopped", "Nothing that was trained is lost.", [["Resume", "resume"], ["Discard it", "discard"]]],
  failed: ["Teaching failed", "", [["Try again", "resume"], ["Discard it", "discard"]]],
  finished: ["Taught", "Use the new model, or keep the one you have.", [["Use this model", "accept"], ["Discard it", "discard"]]],
};

function showRun(run) {
  byId("run").hidden = !run;
  if (!run) return;
  const [title, note, actions] = RUN[run.state];
  byId("run").dataset.state = run.state;
  byId("run-title").textContent = `${title}: ${run.out}`;
  const taught = Object.entries(run.classes).map(([name, n]) => `${name} (${n})`).join(", ");
  const starting = run.state === "running" && !run.works.length ? " Reading the images…" : "";
  byId("run-state").textContent = run.error || `${taught}. ${note}${starting}`;
  byId("works").replaceChildren(...run.works.map(work));
  byId("result").replaceChildren(...(run.result ? resultOf(run) : []));
  byId("run-actions").replaceChildren(...actions.map(([text, action]) => button(text, () => change("/inbox/run", { action }))));
}

async function teach() {
  if (state.notes.length) {
    byId("notes").replaceChildren(...state.notes.map((text) => element("p", { textContent: text })));
    if ((await answered(byId("before"))) !== "teach") return;
  }
  if (!(await change("/inbox/runs", {}))) return;
  byId("run-title").focus();
  byId("run").scrollIntoView();
}

// The whole page.

// Whether a part of the page must be drawn again.
function isNew(part, ...data) {
  const text = JSON.stringify(data);
  if (drawn[part] === text) return false;
  drawn[part] = text;
  return true;
}

function show(found) {
  if (state && found.model !== state.model) {
    news = `${found.model} is served now. `;
    listClasses().catch(() => {});
  }
  state = found;
  const unknown = found.groups.flat().length;
  if (isNew("summary", news + summary(found, unknown))) byId("summary").textContent = news + summary(found, unknown);
  if (isNew("error", found.error)) complain(found.error ?? "");
  byId("unknown-note").textContent = unknown ? noteOnGroups(found) : "None at the moment. New photos in the folder appear here.";
  byId("alarms").hidden = found.false_alarms === null;
  if (isNew("share", found.false_alarms)) byId("share").value = [...byId("share").options].map((each) => each.value).find((value) => Math.abs(value - found.false_alarms) < 0.01) ?? "";
  const back = rememberFocus();
  if (isNew("groups", found.groups)) drawGroups(found.groups);
  byId("fitting").hidden = !found.fitting.length;
  if (isNew("fits", found.fitting)) byId("fits").replaceChildren(...found.fitting.map((each) => picture(each, guess(each))));
  byId("decided").hidden = !found.decided.length;
  if (isNew("decided", found.decided)) byId("classes-named").replaceChildren(...found.decided.map(namedClass));
  const unreadable = Object.entries(found.unreadable);
  byId("others").hidden = !found.dismissed.length && !unreadable.length;
  if (isNew("dismissed", found.dismissed)) byId("dismissed").replaceChildren(...found.dismissed.map((each) => picture(each, button("Undo", () => decide([each.photo], "undo")))));
  if (isNew("unreadable", unreadable)) byId("unreadable").replaceChildren(...unreadable.map(([file, reason]) => element("li", { textContent: `${file}: ${reason}` })));
  if (isNew("run", found.run)) showRun(found.run);
  showBar(found);
  back();
}

// Names that were typed and not sent stay, also where photos were added to their group.
function drawGroups(groups) {
  const typed = new Map();
  for (const group of document.querySelectorAll("#groups .group")) {
    for (const photo of group.querySelectorAll(".photo")) typed.set(photo.dataset.photo, group.querySelector("input").value);
  }
  const text = (members) => ids(members).map((photo) => typed.get(photo)).find(Boolean) ?? "";
  byId("groups").replaceChildren(...groups.map((members, number) => groupOf(members, number, text(members))));
}

function showBar(found) {
  const ready = found.decided.filter((each) => !each.missing);
  const count = ready.reduce((sum, each) => sum + each.photos.length, 0);
  byId("bar").hidden = !found.decided.length && !found.last;
  byId("teach").textContent = `Teach ${classes(ready.length)} (${photos(count)})`;
  byId("teach").disabled = !ready.length || found.run !== null;
  const open = found.run && (found.run.state === "running" ? `${found.run.out} is being taught.` : `Decide about ${found.run.out} first.`);
  byId("teach-note").textContent = open || (ready.length ? `Makes ${found.next} from ${found.model}.` : "A class needs 3 photos.");
  byId("undo").hidden = !found.last;
  if (found.last) byId("undo").textContent = `Undo: ${photos(found.last.photos.length)} ${found.last.class === null ? "dismissed" : `named ${found.last.class}`}`;
}

function summary(found, unknown) {
  if (found.work) return `${found.work}.`;
  const parts = [`${photos(unknown)} in ${found.folder}/ ${unknown === 1 ? "fits" : "fit"} no class of ${found.model}`];
  if (found.fitting.length) parts.push(`${found.fitting.length} fit one`);
  if (found.taught) parts.push(`${found.taught} were taught`);
  return `${parts.join(", ")}.`;
}

function noteOnGroups(found) {
  const fewer = `than ${Number((100 * (1 - found.false_alarms)).toPrecision(3))}% of ${found.known_images.toLocaleString("en-US")} known images`;
  const source = found.known_images ? `Less like a known class ${fewer}.` : "Photos whose score is above the given threshold.";
  return `${source} Below each photo: the nearest class and its probability. Photos of a group look alike. Two groups may get the same name.`;
}

// Focus.

const allPhotos = () => [...document.querySelectorAll("#groups .photo, #fits .photo")];
const buttonOf = (photo) => document.querySelector(`.photo[data-photo="${photo}"]`);
const fieldOf = (photo) => buttonOf(photo)?.closest("#groups .group")?.querySelector("input");
const focusPhoto = (photo) => photo && buttonOf(photo)?.focus();
const focusField = (chosen) => (chosen.map(fieldOf).find(Boolean) ?? buttonOf(chosen[0]))?.focus();

// What puts the focus back where it was, if the page was drawn again.
function rememberFocus() {
  const active = document.activeElement;
  const members = [...(active.closest("#groups .group")?.querySelectorAll(".photo") ?? [])].map((each) => each.dataset.photo);
  const at = active.tagName === "INPUT" && [active.selectionStart, active.selectionEnd];
  return () => {
    if (active.isConnected) return;
    if (!at) return focusPhoto(active.dataset.photo);
    focusField(members);
    if (document.activeElement.tagName === "INPUT") document.activeElement.setSelectionRange(...at);
  };
}

// The photo after the chosen ones, to which the focus moves.
function after(chosen) {
  const order = allPhotos().map((each) => each.dataset.photo);
  const last = Math.max(...chosen.map((photo) => order.indexOf(photo)));
  return order.slice(last + 1).find((photo) => !chosen.includes(photo)) || order.find((photo) => !chosen.includes(photo));
}

function move(from, key) {
  const all = allPhotos();
  if (!from) return all.length && all[0].focus();
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const next = all[all.indexOf(from) + (key === "ArrowRight" ? 1 : -1)];
    return next && next.focus();
  }
  const groups = [...document.querySelectorAll("#groups .group, #fits")].filter((each) => each.querySelector(".photo"));
  const next = groups[groups.findIndex((each) => each.contains(from)) + (key === "ArrowDown" ? 1 : -1)];
  return next && next.querySelector(".photo").focus();
}

async function openDialog(photo) {
  byId("send-photo").src = `/inbox/photo/${photo}`;
  byId("send-class").value = "";
  const answer = answered(byId("send"));
  byId("send-class").focus();
  if ((await answer) === "send") decide([photo], "name", { class: byId("send-class").value });
  else if ((await answer) === "dismiss") decide([photo], "dismiss");
  else focusPhoto(photo);
}

// Keys. No letter does anything but begin a name: a name that is typed can never dismiss, undo or teach.
function onKey(event) {
  if (document.querySelector("dialog[open]") || event.target.closest("input, select")) return;
  const here = document.activeElement.closest("#groups .photo, #fits .photo");
  const group = here && here.closest("#groups .group");
  if (event.ctrlKey || event.metaKey) {
    if (event.key === "z" && state?.last) byId("undo").click();
    else if (event.key === "Enter" && !byId("teach").disabled) byId("teach").click();
    else return;
  } else if (event.altKey) return;
  else if (event.key.startsWith("Arrow")) move(here, event.key);
  else if ((event.key === "Delete" || event.key === "Backspace") && here) {
    const members = event.shiftKey && group ? [...group.querySelectorAll(".photo")] : [here];
    decide(members.map((each) => each.dataset.photo), "dismiss");
  } else if (event.key.length === 1 && event.key !== " " && here) {
    if (group) group.querySelector("input").focus(); // the letter goes there
    else openDialog(here.dataset.photo);
    return;
  } else return;
  event.preventDefault();
}

document.addEventListener("keydown", onKey);
byId("teach").onclick = teach;
byId("undo").onclick = () => decide(state.last.photos, "undo", { when: state.last.when });
byId("share").onchange = () => change("/inbox/false-alarms", { share: Number(byId("share").value) }, "PUT");
for (const cancel of document.querySelectorAll("dialog .cancel")) cancel.onclick = () => cancel.closest("dialog").close("");
poll();
listClasses().catch(() => {});
