"use strict";
// The live page: the report as /report-data tells it, pictures asked about at the point where the dial stands, and an
// extension that is watched. Names are only ever set as text; markup comes from the report alone, which has made them
// harmless.
(() => {
  const at = (id) => document.getElementById(id);
  const element = (tag, content, name) => {
    const made = document.createElement(tag);
    if (content !== undefined) made.append(content);
    if (name) made.className = name;
    return made;
  };
  const share = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)}%`);
  const later = (wait, work) => {
    let timer;
    return (...given) => {
      clearTimeout(timer);
      timer = setTimeout(() => work(...given), wait);
    };
  };

  const ask = async (path, options) => {
    const response = await fetch(path, options).catch((error) => {
      throw error.name === "AbortError" ? error : new Error("the server does not answer; is it still running?");
    });
    const body = await response.json();
    if (!response.ok && !body.predictions) throw new Error(body.error);
    return body;
  };
  const complain = (sentence) => {
    at("message").hidden = !sentence;
    at("message").textContent = sentence;
  };
  const guarded = async (work) => {
    try {
      await work();
    } catch (error) {
      if (error.name !== "AbortError") complain(error.message);
    }
  };

  // The report. It comes at once without labelled images, again with them, and again whenever a point is saved.

  let told = null; // what /report-data said last
  let shown = null; // what the report's script gave back
  let parts = new Map(); // of each class
  const where = () => (told?.data.points ? shown.point() : null);

  const describe = async (start) => {
    const model = await ask("/model");
    parts = new Map(model.classes.map((each) => [each.class, each]));
    document.title = model.name;
    at("version").textContent = model.version;
    await report(start);
    await browse();
  };

  const report = async (start) => {
    const before = told?.state === "working" && shown ? where() : null;
    told = await ask("/report-data");
    at("head").innerHTML = told.header;
    at("contents").innerHTML = told.contents;
    at("report").innerHTML = told.sections;
    at("reach").innerHTML = told.dial;
    at("browse").hidden = told.state === "ready";
    if (told.state !== "ready") at("contents").append(link("browse", "Classes"));
    reading();
    pickable();
    applicable();
    shown = showReport(told.data, {
      start: start ?? before ?? told.current ?? told.data.saved,
      picture: (image) => `/test-image/${image}`,
      turned,
      answered: (answers) => chosen !== null && showClass(answers),
    });
    if (told.state === "working") setTimeout(() => guarded(awaited), 700);
  };

  const link = (id, words) => {
    const anchor = element("a", words);
    anchor.href = `#${id}`;
    return element("li", anchor);
  };

  const awaited = async () => {
    const now = await ask("/report-data?brief=true");
    if (now.state === "working") {
      told = { ...told, ...now };
      reading();
      setTimeout(() => guarded(awaited), 700);
    } else await report();
  };

  const reading = () => {
    const { state, work, done, total, error, problems } = told;
    const far = total ? ` (${work}: ${done.toLocaleString("en-US")} of ${total.toLocaleString("en-US")})` : "";
    const words = {
      working: `The labelled images are being read${far}; accuracies and pictures follow.`,
      failed: `The labelled images cannot be used: ${error}`,
      ready: problems.join("; "),
      none: "",
    }[state];
    at("reading").hidden = !words;
    at("reading").classList.toggle("warn", state === "failed");
    at("reading").textContent = words;
  };

  // The dial: pictures are asked about again where it comes to rest, and "apply" saves it.

  const applicable = () => {
    const dial = at("dial");
    if (!dial) return;
    const apply = element("button", "apply");
    apply.type = "button";
    apply.id = "apply";
    apply.title = "Save this operating point in the model";
    apply.addEventListener("click", () =>
      guarded(async () => {
        complain("");
        const point = shown.point();
        const body = JSON.stringify({ point: told.data.numbers[point], save: true });
        apply.disabled = true;
        try {
          await ask("/operating-point", { method: "PUT", body });
        } catch (error) {
          apply.disabled = false;
          at("dial-help").textContent = error.message;
          throw error;
        }
        await report(point);
        at("dial-help").textContent = `Saved: the model stands at ${told.data.points[point]} now.`;
        at("at").focus({ preventScroll: true });
      }),
    );
    dial.querySelector("button").after(apply);
    at("dial-help").setAttribute("role", "status");
  };
  const turned = (point) => {
    at("apply").disabled = point === told.data.saved;
    if (asked.length) askAgain();
  };

  // Pictures.

  const AT_ONCE = 16; // a request of that many is answered whole by any server
  let asked = [];
  let request = null;

  const send = (files) => {
    const pictures = [...files].map((file) => ({ file, item: element("li"), src: URL.createObjectURL(file) }));
    if (!pictures.length) return;
    asked = [...pictures, ...asked];
    for (const picture of pictures) {
      frame(picture);
      picture.told.append(element("p", "…", "note"));
    }
    at("answers").prepend(...pictures.map((picture) => picture.item));
    at("asked").hidden = false;
    guarded(async () => {
      complain("");
      await answerAll(pictures);
    });
  };

  const answerAll = async (pictures, signal) => {
    const point = where();
    const place = point === null ? "" : `&point=${told.data.numbers[point]}`;
    for (let n = 0; n < pictures.length; n += AT_ONCE) {
      const some = pictures.slice(n, n + AT_ONCE);
      const form = new FormData();
      for (const { file } of some) form.append("files", file, file.name || "picture");
      try {
        const { predictions } = await ask(`/predict?top=5${place}`, { method: "POST", body: form, signal });
        predictions.forEach((prediction, m) => fill(some[m], prediction));
      } catch (error) {
        if (error.name !== "AbortError") for (const picture of some) fill(picture, { error: error.message });
        throw error;
      }
    }
    at("where").textContent = point === null ? "" : `Answers at ${told.data.points[point]}.`;
    // Where the dial was turned meanwhile, these answers are of yesterday.
    if (where() !== point) askAgain();
  };
  const askAgain = later(180, () => {
    request?.abort();
    request = new AbortController();
    const { signal } = request;
    at("answers").classList.add("waiting");
    guarded(() => answerAll(asked, signal)).finally(() => signal.aborted || at("answers").classList.remove("waiting"));
  });

  const frame = (picture) => {
    const left = element("div");
    const image = element("img", undefined, "thumb");
    image.alt = "";
    image.src = picture.src;
    image.onload = () => image.classList.toggle("small", image.naturalWidth <= 64);
    image.onerror = () => image.replaceWith(element("div", "no picture", "thumb none"));
    left.append(image, element("p", picture.file.name || "picture", "file"));
    picture.told = element("div");
    picture.item.append(left, picture.told);
  };

  const marked = (name, fresh) => {
    const split = parts.get(name)?.split ?? "";
    return element("span", fresh ? "new" : split, `mark ${fresh ? "new" : split === "overlap" ? "both" : ""}`);
  };
  const bar = (value, name) => {
    const meter = element("span", undefined, "meter");
    const filled = element("i", undefined, name);
    filled.style.width = `${100 * (value ?? 0)}%`;
    meter.append(filled);
    meter.setAttribute("aria-hidden", "true");
    return meter;
  };

  const fill = (picture, prediction) => {
    if (prediction.error) {
      picture.told.replaceChildren(element("p", `✗ ${prediction.error}`, "warn"));
      return;
    }
    const top = element("ol", undefined, "top");
    for (const answer of prediction.answers) {
      const line = element("li");
      const name = element("span", element("bdi", answer.class));
      if (told?.data.points) name.append(" ", marked(answer.class, answer.new));
      line.append(name, bar(answer.probability, answer.new ? "new" : ""), element("span", share(answer.probability), "number"));
      top.append(line);
    }
    picture.told.replaceChildren(top);
    if (prediction.before) picture.told.append(history(prediction));
  };

  const history = ({ answers, before, branches }) => {
    const facts = element("dl", undefined, "told");
    const [earlier] = before;
    const said = element("dd", element("bdi", earlier.class), "before");
    const same = earlier.class === answers[0].class;
    const why = same ? "the same" : answers[0].new ? "it had no word for this class" : "another answer";
    said.append(` ${share(earlier.probability)} `, element("small", `(${why})`));
    facts.append(element("dt", "Before"), said);
    const shares = element("div", undefined, "shares");
    shares.setAttribute("aria-hidden", "true");
    const words = element("div");
    branches.forEach(({ branch, share: part, top }, n) => {
      const piece = element("i", undefined, n ? "step" : "");
      piece.style.width = `${100 * (part ?? 0)}%`;
      shares.append(piece);
      const alone = element("small", " alone: ");
      alone.append(element("bdi", top[0].class));
      words.append(element("div", `${n ? "◆" : "○"} ${branch} ${share(part)}`));
      words.lastChild.append(alone);
    });
    const brought = element("dd", shares);
    brought.append(words);
    facts.append(element("dt", "Branches"), brought);
    return facts;
  };

  at("files").addEventListener("change", (event) => {
    send(event.target.files);
    event.target.value = "";
  });
  at("clear").addEventListener("click", () => {
    request?.abort();
    for (const { src } of asked) URL.revokeObjectURL(src);
    asked = [];
    at("answers").replaceChildren();
    at("answers").classList.remove("waiting");
    at("asked").hidden = true;
    complain("");
    at("files").focus();
  });
  document.addEventListener("paste", (event) => send(event.clipboardData.files));
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      at("drop").classList.toggle("over", kind === "dragover");
      if (kind === "drop") send(event.dataTransfer.files);
    });
  }

  // Classes: with labelled images those of the report, each with its pictures; without them, their names.

  const MOST = 48;
  let chosen = null;
  const pickable = () => {
    const table = at("classes");
    if (!table || !told.data.labels) return;
    for (const row of table.tBodies[0].rows) {
      const button = element("button", undefined, "pick");
      button.type = "button";
      button.append(...row.cells[0].childNodes);
      row.cells[0].append(button);
    }
    const panel = element("div");
    panel.id = "one";
    panel.hidden = true;
    panel.tabIndex = -1;
    panel.setAttribute("role", "region");
    panel.setAttribute("aria-label", "One class");
    table.closest(".scroll").before(panel);
    table.tBodies[0].addEventListener("click", (event) => {
      const button = event.target.closest(".pick");
      if (!button) return;
      chosen = Number(button.closest("tr").dataset.class);
      showClass(shown.answersAt(shown.point()));
      panel.focus({ preventScroll: true });
      panel.scrollIntoView({ block: "nearest" });
    });
  };

  const showClass = (answers) => {
    const { data } = told;
    const { percent, grouped, pictured } = shown;
    const panel = at("one");
    if (!panel) return;
    const images = data.labels.flatMap((label, image) => (label === chosen ? [image] : []));
    const wrong = images.filter((image) => answers[image] !== chosen);
    const right = images.filter((image) => answers[image] === chosen);
    const taken = new Map();
    for (const image of wrong) taken.set(answers[image], (taken.get(answers[image]) || 0) + 1);
    const head = element("div");
    const close = element("button", "close");
    close.type = "button";
    close.addEventListener("click", () => {
      chosen = null;
      panel.hidden = true;
      at("classes").querySelector(".pick")?.focus({ preventScroll: true });
    });
    const controls = element("div", close, "controls");
    head.append(element("h3", element("bdi", data.classes[chosen])), controls);
    const share = element("p", `${grouped(right.length)} of ${grouped(images.length)} images are right, ${percent(right.length / images.length)}%`);
    share.id = "one-share";
    if (data.before && chosen < data.known) {
      const was = images.filter((image) => data.before[image] === chosen).length;
      share.append(`; ${percent(was / images.length)}% before the last step`);
    } else if (data.before) share.append("; not known before the last step");
    share.append(".");
    const mistakes = [...taken].sort((a, b) => b[1] - a[1]).slice(0, 5);
    const list = element("p", undefined, "note");
    mistakes.forEach(([answer, count], n) => list.append(n ? ", " : "Taken for ", element("bdi", data.classes[answer]), ` (${grouped(count)})`));
    if (mistakes.length) list.append(taken.size > mistakes.length ? ", …" : ".");
    const gallery = element("ul", undefined, "gallery");
    const some = [...wrong, ...right].slice(0, MOST);
    gallery.append(...some.map((image) => pictured(image, answers[image])));
    for (const image of gallery.querySelectorAll("img")) {
      image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth <= 64));
    }
    panel.replaceChildren(head, share, ...(mistakes.length ? [list] : []), gallery);
    if (some.length < images.length) panel.append(element("p", `${some.length} are shown, mistakes first.`, "note"));
    panel.hidden = false;
  };

  const browse = async () => {
    if (at("browse").hidden) return;
    const { found, classes } = await ask(`/classes?limit=25&search=${encodeURIComponent(at("search").value)}`);
    const some = found > classes.length ? `; the first ${classes.length} are shown` : "";
    at("found").textContent = `${found.toLocaleString("en-US")} ${found === 1 ? "class" : "classes"}${some}`;
    const rows = classes.map((each) => {
      const row = element("tr");
      const name = element("th", element("bdi", each.class), "name");
      name.scope = "row";
      if (each.new) name.append(" ", marked(each.class, true));
      row.append(name, element("td", each.branches.join(", "), "word"));
      return row;
    });
    at("names").replaceChildren(...rows);
  };
  at("search").addEventListener(
    "input",
    later(150, () => guarded(browse)),
  );

  // An extension that runs elsewhere.

  const STATES = {
    waiting: "Nothing has begun yet.",
    running: "It runs.",
    saving: "It is being saved.",
    stopped: "It was stopped; the same command goes on.",
    finished: "It is finished.",
  };

  // Markup of numbers alone: there is no name in it.
  const curve = (losses, total) => {
    const known = losses.filter((loss) => loss !== null);
    const low = Math.min(0, ...known);
    const high = Math.max(...known, 1e-9);
    const places = losses.flatMap((loss, n) =>
      loss === null ? [] : [[8 + (n / Math.max(total - 1, 1)) * 284, 100 - ((loss - low) / (high - low)) * 82]],
    );
    const [x, y] = places.at(-1).map((value) => Number(value.toFixed(1)));
    const last = known.at(-1).toFixed(3);
    const words = `loss ${known[0].toFixed(3)} in the first epoch, ${last} in epoch ${losses.length} of ${total}`;
    return (
      `<svg class="chart curve" viewBox="0 0 300 120" role="img" aria-label="${words}">` +
      `<line class="axis" x1="8" x2="292" y1="100" y2="100"/>` +
      `<polyline points="${places.map((place) => place.map((value) => value.toFixed(1))).join(" ")}"/>` +
      `<circle cx="${x}" cy="${y}" r="3"/>` +
      `<text x="${x}" y="${y - 8}" text-anchor="${x > 230 ? "end" : "start"}">${last}</text>` +
      `<text x="8" y="116">epoch 1</text><text x="292" y="116" text-anchor="end">${Number(total)}</text></svg>`
    );
  };

  const left = ({ done, total, since }, updated) => {
    if (done < 2 || done >= total || !updated) return "";
    const seconds = ((updated - since) / (done - 1)) * (total - done);
    return seconds < 90 ? `, ${Math.max(1, Math.round(seconds))} s left` : `, ${Math.round(seconds / 60)} min left`;
  };

  const watched = ({ out, state, works, updated }) => {
    at("progress").hidden = false;
    at("progress-title").textContent = `Extending: ${out}`;
    at("state").textContent = STATES[state];
    const lines = works.map((work) => {
      const line = element("li");
      const gauge = element("progress");
      gauge.max = work.total;
      gauge.value = work.done;
      gauge.setAttribute("aria-label", work.work);
      const done = work.done >= work.total;
      line.append(element("span", `${done ? "✓" : "…"} ${work.work}`), gauge);
      line.append(element("span", `${work.done} of ${work.total}${state === "running" ? left(work, updated) : ""}`, "number"));
      return line;
    });
    at("works").replaceChildren(...lines);
    const trained = works.filter((work) => work.losses?.some((loss) => loss !== null)).at(-1);
    if (trained) {
      const words = element("figcaption", `Mean loss of each epoch, ${trained.work}`);
      const box = element("div");
      box.innerHTML = curve(trained.losses, trained.total);
      box.prepend(words);
      at("losses").replaceChildren(box);
    }
  };

  const open = async () => {
    const { state } = await ask("/report-data?brief=true");
    at("ask").hidden = state === "waiting"; // for a model that is still being made
    if (state === "waiting") setTimeout(() => guarded(open), 1000);
    else await describe();
  };
  const watch = async () => {
    const now = await ask("/progress");
    if (now.state === "none") return;
    watched(now);
    const events = new EventSource("/progress/events");
    events.onmessage = (event) => {
      const news = JSON.parse(event.data);
      watched(news);
      if (news.state === "finished") events.close();
    };
  };
  guarded(open);
  guarded(watch);
})();
