"use strict";
// The one script of the report file and of the served page. The report is complete without it; with it, tables can be
// sorted and all numbers follow the dial. Accuracies and counts at every point are computed in Python; the script looks
// them up. Names are only ever set as text.

const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const element = (tag, content, name) => {
  const made = document.createElement(tag);
  if (content !== undefined) made.append(content);
  if (name) made.className = name;
  return made;
};
// One digit; halves are rounded to even, as Python does.
const digit = (value) => ((4 * value) % 4 === 1 ? value - 0.01 : value).toFixed(1);
const percent = (share) => (share === null || share === undefined ? "–" : digit(100 * share));
const grouped = (number) => number.toLocaleString("en-US");
const change = (from, to) => {
  const points = digit(Math.abs(100 * (to - from)));
  return points === "0.0" ? "±0" : (to > from ? "+" : "\u2212") + points;
};
// A number along the dial: [0, its value at point 0, p, its value from point p on, …].
const countAt = (pairs, point) => {
  let value = 0;
  for (let n = 0; n < pairs.length && pairs[n] <= point; n += 2) value = pairs[n + 1];
  return value;
};

// The report. `data` is what `_script_data` in page.py gives. The served page also gives `start`, the point to begin
// at; `imageAddress`, the address of an image without a thumbnail; `onMove`, called at every point the dial comes to; and
// `onDrawn`, called when the tables have followed.
const showReport = (data, { start, imageAddress, onMove, onDrawn } = {}) => {
  document.documentElement.classList.add("script");
  const follows = data.counts && document.getElementById("dial");
  for (const controls of all(".controls")) controls.hidden = "live" in controls.dataset && !follows;

  // Tables are sorted by a click or a key on their headings.

  const key = (row, column) => {
    const words = row.cells[column].textContent.trim();
    const number = parseFloat(words.replace(/[,+±]/g, "").replace("\u2212", "-"));
    return row.cells[column].classList.contains("number") ? (Number.isNaN(number) ? null : number) : words;
  };
  const sortBy = (table, column, down) => {
    const sign = down ? -1 : 1;
    const keyed = [...table.tBodies[0].rows].map((row) => [key(row, column), row]);
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null); // rows without a number stay below
      return sign * (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
    });
    table.tBodies[0].append(...keyed.map(([, row]) => row));
    all("th", table.tHead).forEach((th, n) => {
      if (n === column) th.setAttribute("aria-sort", down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    });
  };
  const sortAgain = (table) => {
    const column = all("th", table.tHead).findIndex((th) => th.hasAttribute("aria-sort"));
    if (column >= 0) sortBy(table, column, table.tHead.rows[0].cells[column].getAttribute("aria-sort") === "descending");
  };
  for (const table of all("table.sortable")) {
    all("thead th", table).forEach((th, column) => {
      th.querySelector("button")?.addEventListener("click", () => {
        const now = th.getAttribute("aria-sort");
        // Words start with A, numbers with the largest; a second press reverses the order.
        sortBy(table, column, now ? now === "ascending" : th.classList.contains("number"));
      });
    });
  }
  const colour = (cell) => {
    cell.classList.toggle("down", cell.textContent.startsWith("\u2212"));
    cell.classList.toggle("up", cell.textContent.startsWith("+"));
  };
  all("#classes .change, .delta").forEach(colour);

  const classes = document.getElementById("classes");
  const unfold = document.querySelector("[data-unfold]");
  if (classes && classes.tBodies[0].rows.length > 25) classes.classList.add("folded");
  else unfold?.remove();
  unfold?.addEventListener("click", () => {
    classes.classList.remove("folded");
    unfold.hidden = true;
  });
  document.querySelector("[data-filter]")?.addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    classes.classList.toggle("folded", !wanted && unfold?.isConnected && !unfold.hidden);
    for (const row of classes.tBodies[0].rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
  });

  // Images.

  const named = (number) => element("bdi", data.classes[number]);
  const thumbnails = { ...data.thumbnails };
  for (const item of all(".gallery li")) {
    const image = item.querySelector("img");
    thumbnails[item.dataset.image] = { src: image.src, file: image.title };
  }
  const answered = (when, number, right) => {
    if (right) return element("span", `✓ right ${when}`, "right");
    const line = element("span", `✗ ${when}: `, "wrong");
    line.append(named(number));
    return line;
  };
  const card = (image, label, before, answer) => {
    const item = element("li");
    const figure = element("figure");
    const shown = element("img");
    const { src, file } = thumbnails[image] || { src: imageAddress(image), file: "" };
    item.dataset.image = image;
    shown.src = src;
    shown.alt = data.classes[label];
    shown.title = file;
    const words = element("figcaption", element("strong", named(label)));
    if (before !== null) words.append(answered("before", before, before === label));
    words.append(answered("now", answer, answer === label));
    figure.append(shown, words);
    item.append(figure);
    return item;
  };

  // The dial.

  const dial = document.getElementById("dial");
  if (!dial) {
    onDrawn?.(0);
    return { card, point: () => 0 };
  }
  const slider = document.getElementById("at");
  const figures = { dev: data.dev, test: data.test };
  dial.hidden = false;
  all("tr.live").forEach((row) => (row.hidden = false));

  const moveCursors = (point) => {
    for (const cursor of all("[data-cursor]")) {
      const [x0, x1, y0, y1, left, top, right, bottom] = cursor.closest("svg").dataset.scale.split(" ").map(Number);
      const [x, y] = data.axes.map((name) => figures[cursor.dataset.cursor][name][point]);
      const across = left + ((x - x0) / (x1 - x0)) * (right - left);
      const down = bottom - ((y - y0) / (y1 - y0)) * (bottom - top);
      cursor.setAttribute("transform", `translate(${across.toFixed(1)} ${down.toFixed(1)})`);
      cursor.setAttribute("visibility", point === data.saved ? "hidden" : "visible");
    }
  };

  const moveFigures = (point) => {
    for (const element of all("[data-figure]")) {
      const value = figures[element.dataset.on][element.dataset.figure][point];
      if (element.dataset.from) {
        element.textContent = change(Number(element.dataset.from), value);
        colour(element);
      } else element.textContent = percent(value);
    }
    for (const element of all("[data-setting]")) element.textContent = data.points[point].replace(/[bαβ] = /g, "");
    const shown = figures.test || figures.dev;
    const measured = ["base", "novel", "overlap", "all"].filter((name) => shown[name][point] !== null).slice(0, 3);
    const words = measured.map((name) => `${name} ${percent(shown[name][point])}`).join(" · ");
    dial.querySelector("output").textContent = words;
    slider.setAttribute("aria-valuetext", `${data.points[point]}: ${words}`);
    const moved = document.getElementById("moved");
    moved.hidden = point === data.saved;
    const follows = counts ? "All numbers and images are" : figures.test ? "These accuracies are" : "The dial is";
    moved.textContent = `${follows} at ${data.points[point]}; the saved point is ${data.points[data.saved]}.`;
    const tune = document.querySelector("#tune code");
    tune.closest("p").hidden = !data.tune[point];
    if (data.tune[point]) tune.textContent = data.tune[point];
  };

  // Counts: looked up at the point, never recomputed.

  const counts = data.counts;

  const moveClasses = (point) => {
    for (const row of all("#classes tbody tr, #shared tbody tr")) {
      const { images, before, right, by_branch: byBranch } = counts.classes[row.dataset.class];
      const after = countAt(right, point) / images;
      row.querySelector(".after").textContent = percent(after);
      row.querySelector("svg.bar rect")?.setAttribute("x", `${percent(after)}%`);
      const changed = row.querySelector(".change");
      if (changed && before !== null) {
        changed.textContent = change(before, after);
        colour(changed);
      }
      for (const cell of all("[data-branch]", row)) cell.textContent = grouped(countAt(byBranch[cell.dataset.branch], point));
    }
  };

  const moveParts = (point) => {
    for (const row of all("#parts tbody tr")) {
      const { images, right, wrong } = counts.parts[row.dataset.part];
      row.querySelector(".count").textContent = grouped(countAt(right, point));
      row.querySelector(".share").textContent = percent(countAt(right, point) / images);
      for (const cell of all("[data-wrong]", row)) cell.textContent = grouped(countAt(wrong[cell.dataset.wrong], point));
    }
  };

  const movePairs = (point) => {
    for (const box of all("[data-pairs]")) {
      const pairs = counts.pairs[box.dataset.pairs]
        .map(([label, answer, images, before]) => [label, answer, countAt(images, point), countAt(before, point)])
        .filter(([, , images]) => images)
        .sort((a, b) => b[2] - a[2]);
      box.querySelector("[data-total]").textContent = grouped(pairs.reduce((sum, pair) => sum + pair[2], 0));
      box.querySelector("[data-shown]").textContent =
        pairs.length > counts.mostPairs
          ? `the ${counts.mostPairs} most frequent of ${grouped(pairs.length)} pairs`
          : `${grouped(pairs.length)} ${pairs.length === 1 ? "pair" : "pairs"}`;
      const rows = pairs.slice(0, counts.mostPairs).map(([label, answer, images, before]) => {
        const row = element("tr");
        const head = element("th", named(label), "name");
        head.scope = "row";
        row.append(head, element("td", named(answer), "name"), element("td", grouped(images), "number"));
        if ("before" in box.dataset) row.append(element("td", grouped(before), "number"));
        return row;
      });
      box.querySelector("tbody").replaceChildren(...rows);
      sortAgain(box.querySelector("table"));
    }
  };

  const moveGalleries = (point) => {
    for (const [kind, gallery] of Object.entries(counts.galleries)) {
      const only = document.querySelector(`[data-only="${kind}"]`).value;
      const parts = only === "" ? Object.keys(gallery.counts) : [only];
      const total = parts.reduce((sum, part) => sum + countAt(gallery.counts[part] ?? [0, 0], point), 0);
      const cards = [];
      for (const number of gallery.images) {
        const { label, part, before, wasRight, answer: answers } = counts.images[number];
        const answer = countAt(answers, point);
        const belongs = kind === "forgotten" ? wasRight && answer !== label : !wasRight && answer === label;
        if (belongs && (only === "" || part === Number(only)) && cards.length < counts.gallery)
          cards.push(card(number, label, before, answer));
      }
      document.querySelector(`[data-gallery="${kind}"]`).replaceChildren(...cards);
      const of = !total ? "none to show" : cards.length < total ? `${cards.length} of ${grouped(total)} are shown` : `all ${grouped(total)} are shown`;
      document.querySelector(`[data-of="${kind}"]`).textContent = `${grouped(total)} ${total === 1 ? "image" : "images"}; ${of}.`;
    }
  };

  let waiting = false;
  const move = () => {
    const point = Number(slider.value);
    moveFigures(point);
    moveCursors(point);
    onMove?.(point);
    if (!counts || waiting) return;
    waiting = true; // accuracies at once, tables and images when the browser next draws
    requestAnimationFrame(() => {
      waiting = false;
      const now = Number(slider.value);
      moveClasses(now);
      moveParts(now);
      movePairs(now);
      moveGalleries(now);
      onDrawn?.(now);
    });
  };
  const settle = () => classes && requestAnimationFrame(() => sortAgain(classes)); // after the numbers have moved
  const to = (point) => {
    slider.value = point;
    move();
    settle();
  };
  slider.addEventListener("input", move);
  slider.addEventListener("change", settle);
  dial.querySelector("button").addEventListener("click", () => to(data.saved));
  dial.addEventListener("submit", (event) => event.preventDefault());
  for (const button of all("button.go")) button.addEventListener("click", () => to(Number(button.dataset.point)));
  for (const select of all("[data-only]")) select.addEventListener("change", () => counts && moveGalleries(Number(slider.value)));
  if (start !== undefined) to(start);
  else {
    moveFigures(data.saved);
    moveCursors(data.saved);
  }
  return { card, point: () => Number(slider.value) };
};

// The served page: the report that /report-data gives, images classified at the point of the dial, and the progress of an
// extension. HTML comes from the report's templates only, which escape names.
const startServedPage = () => {
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
  let shown = null; // what showReport returned
  let parts = new Map(); // of each class
  const where = () => (report?.data.points ? shown.point() : null);

  const describe = async (start) => {
    const model = await ask("/model");
    parts = new Map(model.classes.map((each) => [each.class, each]));
    document.title = model.name;
    at("version").textContent = model.version;
    await loadReport(start);
    await browse();
  };

  const loadReport = async (start) => {
    const before = report?.state === "working" && shown ? where() : null;
    report = await ask("/report-data");
    at("head").innerHTML = report.header;
    at("contents").innerHTML = report.contents;
    at("report").innerHTML = report.sections;
    at("reach").innerHTML = report.dial;
    at("browse").hidden = report.state === "ready";
    if (report.state !== "ready") at("contents").append(link("browse", "Classes"));
    reading();
    pickable();
    applicable();
    shown = showReport(report.data, {
      start: start ?? before ?? report.current ?? report.data.saved,
      imageAddress: (image) => `/test-image/${image}`,
      onMove,
      onDrawn: () => chosen !== null && showClass(),
    });
    if (report.state === "working") setTimeout(() => guarded(awaited), 700);
  };

  const link = (id, words) => {
    const anchor = element("a", words);
    anchor.href = `#${id}`;
    return element("li", anchor);
  };

  const awaited = async () => {
    const now = await ask("/report-data?brief=true");
    if (now.state === "working") {
      report = { ...report, ...now };
      reading();
      setTimeout(() => guarded(awaited), 700);
    } else await loadReport();
  };

  const reading = () => {
    const { state, work, done, total, error, problems } = report;
    const far = total ? ` (${work}: ${done.toLocaleString("en-US")} of ${total.toLocaleString("en-US")})` : "";
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

  // The dial: images are classified again where it stops, and "save" writes the point to the model.

  const applicable = () => {
    const dial = at("dial");
    if (!dial) return;
    const apply = element("button", "save");
    apply.type = "button";
    apply.id = "apply";
    apply.title = "Save this operating point in the model";
    apply.addEventListener("click", () =>
      guarded(async () => {
        complain("");
        const point = shown.point();
        const body = JSON.stringify({ point: report.data.numbers[point], save: true });
        apply.disabled = true;
        try {
          await ask("/operating-point", { method: "PUT", body, headers: { "Content-Type": "application/json" } });
        } catch (error) {
          apply.disabled = false;
          at("dial-help").textContent = error.message;
          throw error;
        }
        await loadReport(point);
        at("dial-help").textContent = `Saved: the operating point is now ${report.data.points[point]}.`;
        at("at").focus({ preventScroll: true });
      }),
    );
    dial.querySelector("button").after(apply);
    at("dial-help").setAttribute("role", "status");
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
      } catch (error) {
        if (error.name !== "AbortError") for (const picture of some) fill(picture, { error: error.message });
        throw error;
      }
    }
    at("where").textContent = point === null ? "" : `Answers at ${report.data.points[point]}.`;
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
      picture.answers.replaceChildren(element("p", `✗ ${prediction.error}`, "warn"));
      return;
    }
    const top = element("ol", undefined, "top");
    for (const answer of prediction.answers) {
      const line = element("li");
      const name = element("span", element("bdi", answer.class));
      if (report?.data.points) name.append(" ", marked(answer.class, answer.new));
      line.append(name, bar(answer.probability, answer.new ? "new" : ""), element("span", share(answer.probability), "number"));
      top.append(line);
    }
    picture.answers.replaceChildren(top);
    if (prediction.before) picture.answers.append(history(prediction));
  };

  const history = ({ answers, before, branches }) => {
    const facts = element("dl", undefined, "facts-of-answer");
    const [earlier] = before;
    const said = element("dd", element("bdi", earlier.class), "before");
    const same = earlier.class === answers[0].class;
    const why = same ? "the same" : answers[0].new ? "this class was not known" : "another answer";
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

  // Classes: with labelled images those of the report, each with its images; without them, their names.

  const MOST = 48;
  let chosen = null;
  const pickable = () => {
    const table = at("classes");
    if (!table || !report.data.labels) return;
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
      showClass();
      panel.focus({ preventScroll: true });
      panel.scrollIntoView({ block: "nearest" });
    });
  };

  const answersAt = (point) => {
    const { first, image, value, point: points } = report.data.answers;
    const answers = Int32Array.from(first);
    for (let n = 0; n < points.length && points[n] <= point; n++) answers[image[n]] = value[n];
    return answers;
  };
  const showClass = () => {
    const { data } = report;
    const panel = at("one");
    if (!panel) return;
    const answers = answersAt(shown.point());
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
    mistakes.forEach(([answer, count], n) => list.append(n ? ", " : "Mistaken for ", element("bdi", data.classes[answer]), ` (${grouped(count)})`));
    if (mistakes.length) list.append(taken.size > mistakes.length ? ", …" : ".");
    const gallery = element("ul", undefined, "gallery");
    const some = [...wrong, ...right].slice(0, MOST);
    gallery.append(...some.map((image) => shown.card(image, chosen, data.before ? data.before[image] : null, answers[image])));
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
};

const embedded = document.getElementById("data");
if (embedded) showReport(JSON.parse(embedded.textContent));
else if (document.body.classList.contains("served")) startServedPage();
