"use strict";
// A report is whole without this script; with it, tables sort and everything follows the dial.
//
// `data` is what the report's `parts` calls so. A page that does more with it may give `start`, the point to begin at;
// `picture`, where the picture of an image without a small copy is found; `turned`, called with every point the dial
// comes to; and `answered`, called with every image's answer there. It gets back the means to do the same as the report.
const showReport = (data, { start, picture, turned, answered: heard } = {}) => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  // One digit; of two equally near the even one, as everywhere in Branchout.
  const digit = (value) => ((4 * value) % 4 === 1 ? value - 0.01 : value).toFixed(1);
  const percent = (share) => (share === null || share === undefined ? "–" : digit(100 * share));
  const grouped = (number) => number.toLocaleString("en-US");
  const change = (from, to) => {
    const points = digit(Math.abs(100 * (to - from)));
    return points === "0.0" ? "±0" : (to > from ? "+" : "\u2212") + points;
  };
  document.documentElement.classList.add("script");
  const follows = data.labels && document.getElementById("dial");
  for (const controls of all(".controls")) controls.hidden = "live" in controls.dataset && !follows;

  // Tables: sorted by a click or a key on their headings.

  const key = (row, column) => {
    const told = row.cells[column].textContent.trim();
    const number = parseFloat(told.replace(/[,+±]/g, "").replace("\u2212", "-"));
    return row.cells[column].classList.contains("number") ? (Number.isNaN(number) ? null : number) : told;
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
        // Words begin with A, numbers with the largest; a second press turns the order round.
        sortBy(table, column, now ? now === "ascending" : th.classList.contains("number"));
      });
    });
  }
  const colour = (cell) => {
    const told = cell.textContent;
    cell.classList.toggle("down", told.startsWith("\u2212"));
    cell.classList.toggle("up", told.startsWith("+"));
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

  // What every image is answered with, and how one is shown.

  const element = (tag, content, name) => {
    const made = document.createElement(tag);
    if (content !== undefined) made.append(content);
    if (name) made.className = name;
    return made;
  };
  const named = (number) => element("bdi", data.classes[number]);
  const answersAt = (point) => {
    const answers = Int32Array.from(data.answers.first);
    const { image, value, point: at } = data.answers;
    for (let n = 0; n < at.length && at[n] <= point; n++) answers[image[n]] = value[n];
    return answers;
  };
  const pictures = { ...data.pictures };
  for (const item of all(".gallery li")) {
    const image = item.querySelector("img");
    pictures[item.dataset.image] = { src: image.src, file: image.title };
  }
  const answered = (when, number, right) => {
    if (right) return element("span", `✓ right ${when}`, "right");
    const line = element("span", `✗ ${when}: `, "wrong");
    line.append(named(number));
    return line;
  };
  const pictured = (image, answer) => {
    const item = element("li");
    const figure = element("figure");
    const shown = element("img");
    const label = data.labels[image];
    const kept = pictures[image] || { src: picture(image), file: "" };
    item.dataset.image = image;
    shown.src = kept.src;
    shown.alt = data.classes[label];
    shown.title = kept.file;
    const words = element("figcaption");
    words.append(element("strong", named(label)));
    if (data.before) words.append(answered("before", data.before[image], data.before[image] === label));
    words.append(answered("now", answer, answer === label));
    figure.append(shown, words);
    item.append(figure);
    return item;
  };

  // The dial.

  const dial = document.getElementById("dial");
  if (!dial) {
    if (data.labels) heard?.(answersAt(0), 0);
    return { answersAt, pictured, percent, grouped, change, point: () => 0 };
  }
  const slider = document.getElementById("at");
  const live = Boolean(data.labels);
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
    const told = ["base", "novel", "overlap", "all"].filter((name) => shown[name][point] !== null).slice(0, 3);
    const words = told.map((name) => `${name} ${percent(shown[name][point])}`).join(" · ");
    dial.querySelector("output").textContent = words;
    slider.setAttribute("aria-valuetext", `${data.points[point]}: ${words}`);
    const moved = document.getElementById("moved");
    moved.hidden = point === data.saved;
    const follows = live ? "All numbers and pictures are" : figures.test ? "These accuracies are" : "The dial is";
    moved.textContent = `${follows} at ${data.points[point]}; the saved model stands at ${data.points[data.saved]}.`;
    const tune = document.querySelector("#tune code");
    tune.closest("p").hidden = !data.tune[point];
    if (data.tune[point]) tune.textContent = data.tune[point];
  };

  // Everything that follows from each image's answer.

  const wasRight = (image) => data.labels[image] < data.known && data.before[image] === data.labels[image];
  const rules = {
    forgotten: (image, answer) => wasRight(image) && answer !== data.labels[image],
    won: (image, answer) => !wasRight(image) && answer === data.labels[image],
  };

  const moveClasses = (answers) => {
    const images = new Map();
    const right = new Map();
    answers.forEach((answer, image) => {
      const label = data.labels[image];
      images.set(label, (images.get(label) || 0) + 1);
      if (answer === label) right.set(label, (right.get(label) || 0) + 1);
    });
    for (const row of all("#classes tbody tr, #shared tbody tr")) {
      const number = Number(row.dataset.class);
      const after = (right.get(number) || 0) / images.get(number);
      row.querySelector(".after").textContent = percent(after);
      row.querySelector("svg.bar rect")?.setAttribute("x", `${(100 * after).toFixed(1)}%`);
      const changed = row.querySelector(".change");
      if (changed && row.dataset.before) {
        changed.textContent = change(Number(row.dataset.before), after);
        colour(changed);
      }
    }
  };

  const moveParts = (answers) => {
    const cells = new Map();
    const totals = new Map();
    const rights = new Map();
    const add = (map, where) => map.set(where, (map.get(where) || 0) + 1);
    answers.forEach((answer, image) => {
      const label = data.labels[image];
      const part = data.partOf[label];
      add(totals, part);
      if (answer === label) add(rights, part);
      else add(cells, `${part},${data.partOf[answer]}`);
    });
    for (const cell of all("[data-cell]")) cell.textContent = grouped(cells.get(cell.dataset.cell) || 0);
    for (const cell of all("[data-right]")) cell.textContent = grouped(rights.get(Number(cell.dataset.right)) || 0);
    for (const cell of all("[data-share]")) {
      const part = Number(cell.dataset.share);
      cell.textContent = percent((rights.get(part) || 0) / totals.get(part));
    }
  };

  const MOST_PAIRS = 20;
  const movePairs = (answers) => {
    const found = { to_later: new Map(), to_earlier: new Map() };
    answers.forEach((answer, image) => {
      const label = data.labels[image];
      const apart = data.firstBranch[answer] - data.firstBranch[label];
      if (!apart) return;
      const pairs = found[apart > 0 ? "to_later" : "to_earlier"];
      const pair = pairs.get(`${label},${answer}`) || [label, answer, 0, 0];
      pair[2] += 1;
      pair[3] += data.before[image] === label;
      pairs.set(`${label},${answer}`, pair);
    });
    for (const box of all("[data-pairs]")) {
      const pairs = [...found[box.dataset.pairs].values()];
      const names = (pair) => data.classes[pair[0]] + "\u0000" + data.classes[pair[1]];
      pairs.sort((a, b) => b[2] - a[2] || (names(a) < names(b) ? -1 : 1));
      box.querySelector("[data-total]").textContent = grouped(pairs.reduce((sum, pair) => sum + pair[2], 0));
      box.querySelector("[data-shown]").textContent =
        pairs.length > MOST_PAIRS
          ? `the ${MOST_PAIRS} most frequent of ${grouped(pairs.length)} pairs`
          : `${grouped(pairs.length)} ${pairs.length === 1 ? "pair" : "pairs"}`;
      const rows = pairs.slice(0, MOST_PAIRS).map(([label, answer, count, before]) => {
        const row = element("tr");
        const head = element("th", named(label), "name");
        head.scope = "row";
        row.append(head, element("td", named(answer), "name"));
        row.append(element("td", grouped(count), "number"));
        if ("was" in box.dataset) row.append(element("td", grouped(before), "number"));
        return row;
      });
      box.querySelector("tbody").replaceChildren(...rows);
      sortAgain(box.querySelector("table"));
    }
  };

  const moveGalleries = (answers) => {
    for (const kind of Object.keys(rules)) {
      const only = document.querySelector(`[data-only="${kind}"]`).value;
      const belongs = (image) =>
        rules[kind](image, answers[image]) && (only === "" || data.partOf[data.labels[image]] === Number(only));
      let count = 0;
      answers.forEach((_, image) => (count += belongs(image)));
      const shown = data.galleries[kind].filter(belongs).slice(0, data.gallery);
      document.querySelector(`[data-gallery="${kind}"]`).replaceChildren(...shown.map((image) => pictured(image, answers[image])));
      const of =
        shown.length < count ? `${shown.length} of ${grouped(count)} are shown` : count ? `all ${grouped(count)} are shown` : "there are none";
      document.querySelector(`[data-of="${kind}"]`).textContent = `${grouped(count)} ${count === 1 ? "image" : "images"}; ${of}.`;
    }
  };

  const moveSpeakers = (answers, point) => {
    const { images, first, image: changed, point: at, value } = data.speakers;
    const speaking = new Map(images.map((image, n) => [image, first[n]]));
    for (let n = 0; n < at.length && at[n] <= point; n++) speaking.set(changed[n], value[n]);
    const heard = new Map();
    for (const [image, branch] of speaking) {
      const label = data.labels[image];
      if (answers[image] !== label) continue;
      heard.set(`${label},${branch}`, (heard.get(`${label},${branch}`) || 0) + 1);
    }
    for (const row of all("#shared tbody tr")) {
      for (const cell of all("[class*='by-']", row)) {
        const branch = /by-(\d+)/.exec(cell.className)[1];
        cell.textContent = grouped(heard.get(`${row.dataset.class},${branch}`) || 0);
      }
    }
  };

  let asked = false;
  const turn = () => {
    const point = Number(slider.value);
    moveFigures(point);
    moveCursors(point);
    turned?.(point);
    if (!live || asked) return;
    asked = true; // numbers at once, pictures when the browser next draws
    requestAnimationFrame(() => {
      asked = false;
      const now = Number(slider.value);
      const answers = answersAt(now);
      moveClasses(answers);
      moveParts(answers);
      movePairs(answers);
      moveSpeakers(answers, now);
      moveGalleries(answers);
      heard?.(answers, now);
    });
  };
  const settle = () => classes && requestAnimationFrame(() => sortAgain(classes)); // after the numbers have moved
  const to = (point) => {
    slider.value = point;
    turn();
    settle();
  };
  slider.addEventListener("input", turn);
  slider.addEventListener("change", settle);
  dial.querySelector("button").addEventListener("click", () => to(data.saved));
  dial.addEventListener("submit", (event) => event.preventDefault());
  for (const button of all("button.go")) button.addEventListener("click", () => to(Number(button.dataset.point)));
  for (const select of all("[data-only]")) select.addEventListener("change", () => live && moveGalleries(answersAt(Number(slider.value))));
  if (start !== undefined) to(start);
  else {
    moveFigures(data.saved);
    moveCursors(data.saved);
  }
  return { answersAt, pictured, percent, grouped, change, point: () => Number(slider.value) };
};
