// The inbox: shows what /inbox/state says, and sends what is decided. Everything is kept by the server.
"use strict";

const POLL = 1000; // milliseconds between two looks at the state
const byId = (id) => document.getElementById(id);
let shown = null; // the state on the page, as JSON text
let state = null;
const lastDecided = [[]]; // photos of each decision made on this page, the last one at the end
let live = ""; // said before the summary once a model went live
let sending = null; // the photo in the dialog

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

// Talking to the server.

async function ask(path, body, method = "POST") {
  const options = body && { method, headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const response = await fetch(path, options);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function complain(text) {
  byId("message").hidden = !text;
  byId("message").textContent = text;
}

async function change(path, body, method) {
  try {
    const answer = await ask(path, body, method);
    complain("");
    show(answer, true);
    return true;
  } catch (error) {
    complain(error.message);
    return false;
  }
}

async function decide(chosen, action, name) {
  const next = after(chosen);
  for (let start = 0; start < chosen.length; start += 400) {
    const part = { photos: chosen.slice(start, start + 400), action };
    if (!(await change("/inbox/decisions", name === undefined ? part : { ...part, class: name }))) return;
  }
  if (action !== "undo") lastDecided.push(chosen);
  focusPhoto(next);
}

async function poll() {
  try {
    show(await ask("/inbox/state"), false);
  } catch (error) {
    byId("summary").textContent = `The server does not answer: ${error.message}`;
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

function groupOf(members, number) {
  const input = element("input", { autocomplete: "off", maxLength: 120, required: true, list: "known" });
  const form = element("form", { className: "controls" },
    element("label", {}, "Class ", input),
    element("button", { textContent: `Name ${photos(members.length)}` }),
    button("Dismiss", () => decide(ids(members), "dismiss")));
  form.onsubmit = (event) => {
    event.preventDefault();
    decide(ids(members), "name", input.value);
  };
  return element("article", { className: "group", "aria-label": `Group ${number + 1}` },
    element("h3", { textContent: `Group ${number + 1}` }),
    element("ul", { className: "photos" }, ...members.map((each) => picture(each, guess(each)))), form);
}

const ids = (list) => list.map((each) => each.photo);

function namedClass(each) {
  const undo = (decision) => button("Undo", () => decide([decision.photo], "undo"));
  const about = each.missing ? `needs ${each.missing} more to be taught` : each.known ? "a class the model knows" : "a new class";
  return element("article", { className: "group" },
    element("h3", {}, element("bdi", { textContent: each.class }), element("small", { textContent: ` ${photos(each.photos.length)}, ${about}` })),
    element("ul", { className: "photos" }, ...each.photos.map((decision) => picture(decision, undo(decision)))));
}

// The run.

function resultTable(result) {
  const rows = [["old classes", result.before.base, result.after.base], ["new classes", null, result.after.novel]];
  const cells = rows.filter(([, , now]) => now !== null && now !== undefined).map(([name, was, now]) =>
    element("tr", {}, element("th", { scope: "row", textContent: name }),
      element("td", { className: "number", textContent: was === null || was === undefined ? "–" : percent(was) }),
      element("td", { className: "number", textContent: percent(now) })));
  const heads = ["", "before", "after"].map((text) => element("th", { scope: "col", textContent: text, className: text && "number" }));
  const one = result.images ? `One image is ${(100 / result.images).toFixed(1)} points of all of them.` : "";
  const table = element("table", {},
    element("caption", { textContent: `Accuracy in % on ${result.images} held-out images. ${one}` }),
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...cells));
  const right = `${result.photos_right} of the ${photos(result.photos)} are answered right; nearly all of them were used to train.`;
  return [cells.length ? element("div", { className: "scroll" }, table) : "", element("p", { textContent: right }),
    ...result.warnings.map((line) => element("p", { className: "note", textContent: line }))];
}

function work(each) {
  const bar = element("progress", { max: each.total, value: each.done });
  bar.setAttribute("aria-label", each.work);
  return element("li", {}, element("span", { textContent: each.work }), bar,
    element("span", { className: "number", textContent: `${each.done} of ${each.total}` }));
}

const RUN = {
  running: ["Teaching", "This goes on when you close the page.", [["Stop", "stop"]]],
  stopped: ["Teaching was stopped", "Nothing that was trained is lost.", [["Resume", "resume"], ["Throw away", "discard"]]],
  failed: ["Teaching failed", "", [["Try again", "resume"], ["Throw away", "discard"]]],
  finished: ["Taught", "Use the new model, or keep the one you have.", [["Go live", "accept"], ["Throw away", "discard"]]],
};

function showRun(run) {
  byId("run").hidden = !run;
  if (!run) return;
  const [title, note, actions] = RUN[run.state];
  byId("run").dataset.state = run.state;
  byId("run-title").textContent = `${title}: ${run.out}`;
  byId("run-state").textContent = run.error || `${Object.entries(run.classes).map(([name, n]) => `${name} (${n})`).join(", ")}. ${note}`;
  byId("works").replaceChildren(...run.works.map(work));
  byId("result").replaceChildren(...(run.result ? resultTable(run.result).filter((each) => each !== "") : []));
  byId("run-actions").replaceChildren(...actions.map(([text, action]) => button(text, () => act(action, run))));
}

async function act(action, run) {
  if (!(await change("/inbox/run", { action }))) return;
  if (action === "accept") {
    live = `${run.out} is served now. `;
    byId("summary").textContent = live + summary(state, state.groups.flat().length);
    listClasses();
  }
}

// The whole page.

function show(found, mine) {
  const text = JSON.stringify(found);
  const typing = document.activeElement && document.activeElement.tagName === "INPUT" && byId("groups").contains(document.activeElement);
  if (text === shown || (typing && !mine)) return; // nothing new, or a name is being typed
  const focused = document.activeElement && document.activeElement.dataset.photo;
  shown = text;
  state = found;
  const unknown = found.groups.flat().length;
  byId("summary").textContent = live + summary(found, unknown);
  if (found.state === "failed") complain(found.error);
  byId("unknown-note").textContent = unknown ? noteOnGroups(found) : "None at the moment. New photos in the folder appear here.";
  byId("alarms").hidden = found.false_alarms === null;
  byId("share").value = [...byId("share").options].map((each) => each.value).find((value) => Math.abs(value - found.false_alarms) < 0.01) ?? "";
  byId("groups").replaceChildren(...found.groups.map(groupOf));
  byId("decided").hidden = !found.decided.length;
  byId("classes-named").replaceChildren(...found.decided.map(namedClass));
  const ready = found.decided.filter((each) => !each.missing);
  const count = ready.reduce((sum, each) => sum + each.photos.length, 0);
  byId("teach").textContent = `Teach ${classes(ready.length)} (${photos(count)})`;
  byId("teach").disabled = !ready.length || found.run !== null;
  byId("teach-note").textContent = found.run ? "" : ready.length ? `Makes ${found.next} from ${found.model}.` : "A class needs 3 photos.";
  byId("fitting").hidden = !found.fitting.length;
  byId("fits").replaceChildren(...found.fitting.map((each) => picture(each, guess(each))));
  const unreadable = Object.entries(found.unreadable);
  byId("others").hidden = !found.dismissed.length && !unreadable.length;
  byId("dismissed").replaceChildren(...found.dismissed.map((each) => picture(each, button("Undo", () => decide([each.photo], "undo")))));
  byId("unreadable").replaceChildren(...unreadable.map(([file, reason]) => element("li", { textContent: `${file}: ${reason}` })));
  showRun(found.run);
  if (focused) focusPhoto(focused);
}

function summary(found, unknown) {
  if (found.work) return `${found.work}.`;
  const parts = [`${photos(unknown)} in ${found.folder}/ ${unknown === 1 ? "fits" : "fit"} no class of ${found.model}`];
  if (found.fitting.length) parts.push(`${found.fitting.length} fit one`);
  if (found.taught) parts.push(`${found.taught} were taught`);
  return `${parts.join(", ")}.`;
}

function noteOnGroups(found) {
  const share = Number((100 * found.false_alarms).toPrecision(3));
  const source = found.known_images ? `a threshold that ${share}% of ${found.known_images.toLocaleString("en-US")} known images exceed` : "the threshold that was given";
  return `Unlike the known classes by ${source}. Under each photo is the nearest class. Groups look alike; two groups may get the same name.`;
}

// Keys.

const allPhotos = () => [...document.querySelectorAll("#groups .photo, #fits .photo")];

function focusPhoto(photo) {
  const found = photo && document.querySelector(`.photo[data-photo="${photo}"]`);
  if (found) found.focus();
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

function openDialog(photo) {
  sending = photo;
  byId("send-photo").src = `/inbox/photo/${photo}`;
  byId("send-class").value = "";
  byId("send").returnValue = "";
  byId("send").showModal();
  byId("send-class").focus();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("send").open || /INPUT|SELECT/.test(event.target.tagName)) return;
  const here = document.activeElement && document.activeElement.closest(".photo");
  const photo = here && here.dataset.photo;
  const group = here && here.closest("#groups .group");
  const members = group ? [...group.querySelectorAll(".photo")].map((each) => each.dataset.photo) : [];
  const open = here && here.closest("#groups, #fits");
  if (event.key.startsWith("Arrow")) move(here, event.key);
  else if (event.key === "n" && group) group.querySelector("input").focus();
  else if (event.key === "s" && open) openDialog(photo);
  else if (event.key === "x" && open) decide([photo], "dismiss");
  else if (event.key === "X" && group) decide(members, "dismiss");
  else if (event.key === "u" && lastDecided.length > 1) decide(lastDecided.pop(), "undo");
  else if (event.key === "t" && !byId("teach").disabled) byId("teach").click();
  else return;
  event.preventDefault();
}

document.addEventListener("keydown", onKey);
byId("teach").onclick = async () => {
  if (!(await change("/inbox/runs", {}))) return;
  byId("run-title").focus();
  byId("run").scrollIntoView();
};
byId("share").onchange = () => change("/inbox/false-alarms", { share: Number(byId("share").value) }, "PUT");
byId("send-cancel").onclick = () => byId("send").close("");
byId("send").addEventListener("close", () => {
  const answer = byId("send").returnValue;
  if (answer === "send") decide([sending], "name", byId("send-class").value);
  else if (answer === "dismiss") decide([sending], "dismiss");
  else focusPhoto(sending);
});
poll();
listClasses().catch(() => {});
