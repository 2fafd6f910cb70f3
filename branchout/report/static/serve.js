"use strict";
// The served page: the report that /report-data gives, images classified at the point of the dial, and the progress of an
// extension. HTML comes from the report's templates only, which escape names.
{
  const at = (id) => document.getElementById(id);
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
      throw error.name === "AbortError" ? error : new Error("the server does not respond; is it still running?");
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

  // The report: loaded at once without labelled images, again with them, and again whenever a point is saved.

  let report = null; // the last answer of /report-data
  let asking = false; // whether a newer one is on its way
  let parts = new Map(); // of each class
  const where = () => (report?.data.points ? Number(at("at")?.value ?? 0) : null);

  const MOST_NAMES = 2000; // that a field suggests
  const describe = async (start) => {
    const model = await ask("/model");
    parts = new Map(model.classes.map((each) => [each.class, each]));
    at("version").textContent = model.version;
    const names = model.classes.slice(0, MOST_NAMES).map((each) => Object.assign(element("option"), { value: each.class }));
    at("names-to-expect").replaceChildren(...names);
    await loadReport(start);
    await browse();
  };

  const loadReport = async (start) => {
    const before = report?.state === "working" ? where() : null;
    asking = true;
    try {
      report = await ask("/report-data");
    } finally {
      asking = false;
    }
    tell("");
    for (const [id, piece] of [["head", "title"], ["figures", "figures"], ["contents", "contents"], ["report", "sections"], ["reach", "dial"]])
      at(id).innerHTML = report[piece];
    document.title = at("head").querySelector("h1").textContent;
    at("browse").hidden = report.state === "ready";
    if (report.state !== "ready") at("contents").append(link("browse", "Classes"));
    reading();
    addSave();
    const chosen = start ?? before;
    if (chosen !== null && chosen !== undefined) {
      const { name, query } = readAddress();
      query.delete("at");
      if (chosen !== report.data.saved) query.set("at", chosen);
      writeAddress(name, query);
    }
    showReport(report.data, {
      start: chosen ?? report.current ?? report.data.saved,
      imageAddress: (image) => `/test-image/${image}`,
      onMove,
      explain: (image, expect) => answerOf(image, expect),
    });
    if (report.state === "working") setTimeout(() => guarded(awaited), 700);
  };

  // What the model says about a labelled image at the point of the dial.
  const answerOf = async (image, expect) => {
    const query = new URLSearchParams({ top: 3 });
    if (where() !== null) query.set("point", report.data.numbers[where()]);
    if (expect !== null) query.set("expect", expect);
    return ask(`/test-image/${image}/prediction?${query}`);
  };

  // What has changed since this tab was loaded: another model, or another saved point.
  const news = async () => {
    if (document.visibilityState === "hidden" || asking || report === null) return;
    let now = null;
    try {
      now = await ask("/report-data?brief=true");
    } catch {
      tell("The server does not respond; is it still running?");
      return;
    }
    if (asking) return;
    if (now.loaded !== report.loaded)
      tell(`The server now serves ${now.model}. `, "Show it", async () => {
        writeAddress("", new URLSearchParams());
        await describe();
        if (asked.length) askAgain();
      });
    else if (now.folder_changed) tell("The folder of the model now holds another one. Restart the server to serve it.");
    else if (now.saved_point !== report.saved_point)
      tell("Another operating point was saved in the model. ", "Use it", async () => {
        const latest = await ask("/report-data?brief=true"); // yet another one may have been saved since
        const body = JSON.stringify({ point: latest.saved_point });
        await ask("/operating-point", { method: "PUT", body, headers: { "Content-Type": "application/json" } });
        writeAddress("", new URLSearchParams());
        await loadReport();
      });
    else tell("");
  };
  const tell = (words, action, work) => {
    if (at("news").dataset.words === words) return;
    at("news").dataset.words = words;
    at("news").hidden = !words;
    at("news").replaceChildren(words, ...(action ? [button(action, "pick", () => guarded(work))] : []));
  };
  setInterval(news, 3000);
  document.addEventListener("visibilitychange", news);

  const link = (id, words) => {
    const anchor = element("a", words);
    anchor.href = `#${id}`;
    return element("li", anchor);
  };

  const awaited = async () => {
    const now = await ask("/report-data?brief=true");
    if (now.loaded !== report.loaded) return; // another model, which the page does not show yet
    if (now.state === "working") {
      report = { ...report, work: now.work, done: now.done, total: now.total };
      reading();
      setTimeout(() => guarded(awaited), 700);
    } else await loadReport();
  };

  const reading = () => {
    const { state, work, done, total, error, problems } = report;
    const far = total ? ` (${work}: ${grouped(done)} of ${grouped(total)})` : "";
    const words = {
      working: `Reading the labelled images${far}. Accuracies and galleries will follow.`,
      failed: `The labelled images cannot be used: ${error}`,
      ready: problems.join("; "),
      none: "",
    }[state];
    at("reading").hidden = !words;
    at("reading").classList.toggle("warn", state === "failed");
    at("reading").textContent = words;
  };

  // The dial: images are classified again where it stops; saving writes the point to the model and can be undone.

  let replaced = null; // the point that was saved before the last save
  const save = async (point) => {
    complain("");
    at("apply").disabled = true;
    const earlier = report.data.saved;
    try {
      const body = JSON.stringify({ point: report.data.numbers[point], save: true });
      await ask("/operating-point", { method: "PUT", body, headers: { "Content-Type": "application/json" } });
    } catch (error) {
      at("apply").disabled = false;
      at("told").textContent = error.message;
      throw error;
    }
    replaced = replaced === point ? null : earlier;
    await loadReport(point);
    at("told").textContent = `Saved: the operating point of the model is now ${report.data.words[point]}.`;
    if (replaced !== null) at("told").append(" ", button("Undo saving", "pick", () => guarded(() => save(replaced))));
    at("at").focus({ preventScroll: true });
  };
  const addSave = () => {
    if (!at("dial")) return;
    const apply = button("Save in the model", "", () => guarded(() => save(where())));
    apply.id = "apply";
    at("reset").after(apply);
  };
  const onMove = (point) => {
    at("apply").disabled = point === report.data.saved;
    if (asked.length) askAgain();
  };

  // Images to classify.

  const AT_ONCE = 16; // images in one request, within the limits of any server
  let asked = [];
  let request = null;

  const send = (files) => {
    const pictures = [...files].map((file) => ({ file, item: element("li"), src: URL.createObjectURL(file) }));
    if (!pictures.length) return;
    asked = [...pictures, ...asked];
    for (const picture of pictures) {
      frame(picture);
      picture.answers.append(element("p", "…", "note"));
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
    const place = point === null ? "" : `&point=${report.data.numbers[point]}`;
    for (let n = 0; n < pictures.length; n += AT_ONCE) {
      const some = pictures.slice(n, n + AT_ONCE);
      const form = new FormData();
      for (const { file } of some) form.append("files", file, file.name || "image");
      try {
        const { predictions } = await ask(`/predict?top=5${place}`, { method: "POST", body: form, signal });
        predictions.forEach((prediction, m) => fill(some[m], prediction));
        announce(predictions.map(spoken).join(". "));
      } catch (error) {
        if (error.name !== "AbortError") for (const picture of some) fill(picture, { error: error.message });
        throw error;
      }
    }
    at("where").textContent = point === null ? "" : `Answers at ${report.data.words[point]}.`;
    // If the dial moved meanwhile, these answers are outdated.
    if (where() !== point) askAgain();
  };
  const askAgain = later(180, () => {
    request?.abort();
    request = new AbortController();
    const { signal } = request;
    at("answers").classList.add("waiting");
    guarded(() => answerAll(asked, signal)).finally(() => signal.aborted || at("answers").classList.remove("waiting"));
  });

  const spoken = ({ file, error, answers, before }) => {
    if (error) return `${file}: ${error}`;
    const earlier = before ? `, before ${before[0].class}` : "";
    return `${file}: ${answers[0].class} ${share(answers[0].probability)}${earlier}`;
  };
  const frame = (picture) => {
    const left = element("div");
    const image = element("img", undefined, "thumb");
    image.alt = "";
    image.src = picture.src;
    image.onload = () => image.classList.toggle("small", image.naturalWidth <= 64);
    image.onerror = () => image.replaceWith(element("div", "no preview", "thumb none"));
    left.append(image, element("p", picture.file.name || "image", "file"));
    picture.answers = element("div");
    picture.item.append(left, picture.answers);
  };

  const marked = (name, fresh) => {
    const split = parts.get(name)?.split ?? "";
    return element("span", fresh ? "new" : split, `mark ${fresh ? "new" : split === "overlap" ? "both" : ""}`);
  };
  const meter = (value, name) => {
    const box = element("span", undefined, "meter");
    const filled = element("i", undefined, name);
    filled.style.width = `${100 * (value ?? 0)}%`;
    box.append(filled);
    box.setAttribute("aria-hidden", "true");
    return box;
  };

  const fill = (picture, prediction) => {
    if (prediction.error) {
      picture.answers.replaceChildren(element("p", `✗ ${prediction.error}`, "warn"));
      return;
    }
    const top = element("ol", undefined, "top");
    for (const answer of prediction.answers) {
      const line = element("li");
      const name = element("span", element("bdi", answer.class));
      if (report?.data.points) name.append(" ", marked(answer.class, answer.new));
      line.append(name, meter(answer.probability, answer.new ? "new" : ""), element("span", share(answer.probability), "number"));
      top.append(line);
    }
    picture.answers.replaceChildren(top);
    if (prediction.before) picture.answers.append(history(prediction));
    picture.answers.append(whyNot(picture));
  };

  // "Why not robin?" about an uploaded image, at the point of the dial.
  const whyNot = (picture) =>
    whyForm(picture.expected, async (expect) => {
      picture.expected = expect;
      const query = new URLSearchParams({ top: 1, expect });
      if (where() !== null) query.set("point", report.data.numbers[where()]);
      const body = new FormData();
      body.append("files", picture.file, picture.file.name || "image");
      const { predictions } = await ask(`/predict?${query}`, { method: "POST", body });
      return predictions[0].why;
    });

  const history = ({ answers, before, branches }) => {
    const facts = element("dl", undefined, "facts-of-answer");
    const [earlier] = before;
    const said = element("dd", element("bdi", earlier.class), "before");
    const same = earlier.class === answers[0].class;
    const why = same ? "the same" : answers[0].new ? "this class was not known" : "another answer";
    said.append(` ${share(earlier.probability)} `, element("small", `(${why})`));
    facts.append(element("dt", "Before"), said);
    const words = element("div");
    branches.forEach(({ branch, share: part, top }, n) => {
      const alone = element("small", " alone: ");
      alone.append(element("bdi", top[0].class));
      words.append(element("div", `${n ? "◆" : "○"} ${branch} ${share(part)}`));
      words.lastChild.append(alone);
    });
    const brought = element("dd", shareBar(branches.map((branch) => branch.share)));
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

  // Classes by name, without labelled images.

  const browse = async () => {
    if (at("browse").hidden) return;
    const { found, classes } = await ask(`/classes?limit=25&search=${encodeURIComponent(at("search").value)}`);
    const some = found > classes.length ? `; the first ${classes.length} are shown` : "";
    at("found").textContent = counted(found, "class", "classes") + some;
    at("found").closest(".scroll").hidden = !found;
    tellMatches(at("search"), "", found);
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

  // The progress of an extension that another process runs.

  const STATES = {
    waiting: "Not started yet.",
    running: "Running.",
    saving: "Saving.",
    stopped: "Stopped. Run the same command again to continue.",
    finished: "Finished.",
  };

  // HTML made of numbers only: no name can be in it.
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
    at("ask").hidden = state === "waiting"; // until the model is finished
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
}
