// The report. It is complete without a script; with it, all numbers follow the dial, and every number leads to its
// images. Accuracies come from Python; counts are made from the answers that the images have at a point.

// `data` is what `_script_data` in page.py gives. The served page also gives `start`, the point to begin
// at; `imageAddress`, the address of an image without a thumbnail; `onMove`, called at every point the dial comes to;
// and `explain`, which asks the model about one labelled image.
const FEW = 12; // images of a gallery until more are asked for; the stylesheet hides the others
const PRINTED = 35; // on paper
const showReport = (data, { start, imageAddress, onMove, explain } = {}) => {
  document.documentElement.classList.add("script");
  const dial = document.getElementById("dial");
  const slider = document.getElementById("at");
  const sets = data.labels ? imageSets(data) : null;
  const point = () => (dial ? Number(slider.value) : 0);
  for (const controls of all(".controls:not(#asked), [data-live]")) controls.hidden = "live" in controls.dataset && !(sets && dial);
  dressTables();

  // Images.

  const named = (number) => element("bdi", data.classes[number]);
  const thumbnails = { ...data.thumbnails };
  for (const item of all(".gallery li")) {
    const kept = thumbnails[item.dataset.image];
    if (kept) kept.src ??= item.querySelector("img").src;
  }
  const picture = (image) => {
    const shown = element("img");
    const kept = thumbnails[image];
    shown.src = kept?.src ?? imageAddress(image);
    shown.alt = data.classes[data.labels[image]];
    shown.title = kept?.file ?? "";
    shown.loading = "lazy";
    shown.addEventListener("load", () => shown.classList.toggle("small", shown.naturalWidth <= 64));
    return shown;
  };
  const available = (image) => Boolean(imageAddress) || image in thumbnails;
  const answered = (when, number, right) => {
    if (right) return element("span", `✓ right ${when}`, "right");
    const line = element("span", `✗ ${when}: `, "wrong");
    line.append(named(number));
    return line;
  };
  const verdicts = (image, answer) => {
    const label = data.labels[image];
    const lines = [answered("now", answer, answer === label)];
    if (data.before !== null) lines.unshift(answered("before", data.before[image], data.before[image] === label));
    return lines;
  };
  const card = (image, answer, query) => {
    const item = element("li");
    item.dataset.image = image;
    const figure = element("figure");
    const words = element("figcaption", element("strong", named(data.labels[image])));
    words.append(...verdicts(image, answer));
    figure.append(button(picture(image), "look", () => view.open({ ...query, image })), words);
    item.append(figure);
    return item;
  };
  // A number that leads to its images.
  const leading = (number, query, words = grouped(number)) =>
    number ? button(words, "pick", () => view.open(query)) : words;

  // What the page shows besides images: a point of the dial, a search, orders of tables, parts of galleries.
  const pageQuery = () => {
    const query = new URLSearchParams();
    if (dial && point() !== data.saved) query.set("at", point());
    const wanted = all("[type=search]").map((input) => input.value.trim()).find(Boolean);
    if (wanted) query.set("find", wanted);
    for (const table of all("table[data-sorted]")) query.append("sort", `${table.id}.${table.dataset.sorted}`);
    for (const only of all("[data-only]")) if (only.value) query.set(only.dataset.only, data.parts[only.value]);
    return query;
  };
  const writePage = (section) => {
    const { name } = readAddress();
    if (name === "images") view?.write();
    else writeAddress(section ?? name, pageQuery());
  };
  const view = sets ? imageView({ data, sets, point, picture, available, verdicts, named, thumbnails, explain, pageQuery }) : null;
  const readPage = () => {
    const { name, query } = readAddress();
    const at = query.get("at");
    if (dial && at !== null && data.points[at] !== undefined && Number(at) !== point()) to(Number(at));
    for (const input of all("[type=search]")) {
      if (!query.has("find") || input.value.trim() === query.get("find")) continue;
      input.value = query.get("find");
      input.dispatchEvent(new Event("input", { bubbles: true }));
    }
    for (const [id, column, down] of query.getAll("sort").map((words) => words.split("."))) {
      const table = document.getElementById(id);
      if (!table?.matches(".sortable") || !table.tHead.rows[0].cells[column]) continue;
      sortBy(table, Number(column), down === "down");
      table.dataset.sorted = down ? `${column}.down` : column;
    }
    for (const only of all("[data-only]")) {
      const part = data.parts?.indexOf(query.get(only.dataset.only)) ?? -1;
      if (part < 0 || !all("option", only).some((each) => each.value === String(part))) continue;
      only.value = part;
      only.dispatchEvent(new Event("change"));
    }
    if (name === "images" && view) return view.show(query);
    view?.close();
    const section = document.getElementById(name);
    if (section && [...query].length) section.scrollIntoView(); // the browser does so for a section alone
    else if (section) writePage();
  };

  // Accuracies, looked up.

  const figures = { dev: data.dev, test: data.test };
  const colour = (cell, words) => {
    cell.classList.toggle("down", words.startsWith("\u2212"));
    cell.classList.toggle("up", words.startsWith("+"));
  };
  const dots = all("[data-point] > .dot"); // of the chart, one for each point and set of images
  const moveCursors = (place) => {
    for (const cursor of all("[data-cursor]")) {
      const dot = cursor.closest("svg").querySelector(`.${cursor.dataset.cursor} [data-point="${place}"] > .dot`);
      cursor.setAttribute("transform", `translate(${dot.getAttribute("cx")} ${dot.getAttribute("cy")})`);
      cursor.setAttribute("visibility", place === data.saved ? "hidden" : "visible");
    }
    // Tab reaches the point of the dial, arrow keys the others.
    const here = dots.filter((dot) => Number(dot.parentNode.dataset.point) === place).at(-1);
    for (const dot of dots) dot.parentNode.setAttribute("tabindex", dot === here ? 0 : -1);
  };
  const moveFigures = (place) => {
    for (const shown of all("[data-figure]")) {
      const value = figures[shown.dataset.on][shown.dataset.figure][place];
      shown.textContent = shown.dataset.from ? change(Number(shown.dataset.from), value) : percent(value);
    }
    for (const shown of all("[data-setting]")) shown.textContent = data.points[place].replace(/[bαβ] = /g, "");
    const shown = figures.test || figures.dev;
    const measured = data.metrics.filter((name) => shown[name][place] !== null).slice(0, 3);
    const words = measured.map((name) => `${name} ${percent(shown[name][place])}`).join(" · ");
    dial.querySelector("output").textContent = words;
    slider.setAttribute("aria-valuetext", `${data.words[place]}: ${words}`);
    const moved = document.getElementById("moved");
    moved.hidden = place === data.saved;
    const follows = sets ? "All numbers and images are" : figures.test ? "These accuracies are" : "The dial is";
    moved.textContent = `${follows} at ${data.words[place]}; the saved point is ${data.words[data.saved]}.`;
    const tune = document.querySelector("#tune code");
    tune.closest("p").hidden = !data.tune[place];
    if (data.tune[place]) tune.textContent = data.tune[place];
  };

  // Counts, made from the images' answers.

  const fraction = (cell, right, images) => {
    cell.replaceChildren(`${grouped(right)}/${grouped(images)}`);
    if (images >= 50) cell.append(" ", element("small", `${percent(right / images)}%`));
    cell.dataset.value = right / images;
  };
  const tally = (place) => {
    const now = sets.answers(place);
    const branches = sets.branches(place);
    const classes = data.classes.map(() => ({ images: 0, before: 0, after: 0, lost: 0, gained: 0, by: data.branchNames.map(() => 0) }));
    const parts = data.parts.map(() => ({ images: 0, right: 0, lost: 0, gained: 0, wrong: data.parts.map(() => 0) }));
    const pairs = { to_later: new Map(), to_earlier: new Map() };
    const old = { images: 0, before: 0, after: 0, lost: 0, gained: 0 };
    data.labels.forEach((label, image) => {
      const answer = now[image];
      const right = answer === label;
      const was = sets.wasRight(image);
      const part = parts[data.partOf[label]];
      part.images++;
      part.lost += was && !right;
      part.gained += !was && right;
      if (right) part.right++;
      else part.wrong[data.partOf[answer]]++;
      for (const row of sets.isOld(image) ? [classes[label], old] : [classes[label]]) {
        row.images++;
        row.before += was;
        row.after += right;
        row.lost += was && !right;
        row.gained += !was && right;
      }
      if (right) classes[label].by[branches[image]]++;
      const apart = data.firstBranch[answer] - data.firstBranch[label];
      if (!apart) return;
      const found = pairs[apart > 0 ? "to_later" : "to_earlier"];
      const key = label * data.classes.length + answer;
      const pair = found.get(key) ?? { label, answer, images: 0, before: 0 };
      pair.images++;
      pair.before += data.before?.[image] === label && was;
      found.set(key, pair);
    });
    return { now, classes, parts, pairs, old };
  };
  const moveTitle = ({ old, parts }) => {
    for (const shown of all("[data-part-images]")) {
      const { images, lost, gained } = parts[shown.dataset.partImages];
      const noise = gained !== lost && withinNoise(lost, gained);
      shown.textContent = `${signed(gained - lost)} of ${counted(images, "image")}${noise ? ": within noise" : ""}`;
    }
    const set = (name, words) => all(`[data-old="${name}"]`).forEach((shown) => (shown.textContent = words));
    if (!old.images) return;
    const points = change(old.before / old.images, old.after / old.images);
    set("share", percent(old.after / old.images));
    set("change", points === "±0" ? ", the same as before" : `, ${points.slice(1)} points ${points[0] === "+" ? "higher" : "lower"} than before`);
    const lost = parts.map((part, step) => [part.lost - part.gained, part.images, step]).slice(1, -2).filter(([images]) => images > 0);
    set("worse", lost.map(([images, of, step]) => `; step ${step} lost ${grouped(images)} of ${counted(of, "image")}`).join(""));
    set("after", grouped(old.after));
    set("noise", old.after !== old.before && withinNoise(old.lost, old.gained) ? ": within noise" : "");
  };
  const moveClasses = ({ classes }) => {
    for (const row of all("#classes tbody tr, #shared tbody tr")) {
      const number = Number(row.dataset.class);
      const { images, after, lost, gained, by } = classes[number];
      if (!row.querySelector(".pick")) {
        const name = button(undefined, "pick", () => view.open({ class: data.classes[number] }));
        name.append(...row.cells[0].childNodes);
        row.cells[0].append(name);
      }
      fraction(row.querySelector(".after"), after, images);
      row.querySelector("svg.bar rect")?.setAttribute("x", `${percent(after / images)}%`);
      const changed = row.querySelector(".change");
      if (changed && data.before !== null && number < data.known) {
        const noise = gained !== lost && withinNoise(lost, gained);
        changed.replaceChildren(signed(gained - lost));
        if (noise) changed.append(" ", element("small", "within noise", "noise"));
        changed.dataset.value = gained - lost;
        colour(changed, noise ? "" : signed(gained - lost));
      }
      for (const cell of all("[data-branch]", row)) cell.textContent = grouped(by[cell.dataset.branch]);
    }
  };
  const moveParts = ({ parts }) => {
    for (const row of all("#parts tbody tr")) {
      const { images, right, wrong } = parts[row.dataset.part];
      const part = data.parts[row.dataset.part];
      row.querySelector(".count").replaceChildren(leading(right, { part, as: "right" }));
      row.querySelector(".share").textContent = percent(right / images);
      for (const cell of all("[data-wrong]", row)) {
        const number = wrong[cell.dataset.wrong];
        cell.replaceChildren(leading(number, { part, as: data.parts[cell.dataset.wrong] }));
      }
    }
  };
  const movePairs = ({ pairs }) => {
    for (const box of all("[data-pairs]")) {
      const name = (number) => data.classes[number];
      const order = (a, b) => (a === b ? 0 : a < b ? -1 : 1);
      const found = [...pairs[box.dataset.pairs].values()].sort(
        (a, b) => b.images - a.images || order(name(a.label), name(b.label)) || order(name(a.answer), name(b.answer)),
      );
      box.querySelector("[data-total]").textContent = grouped(found.reduce((sum, pair) => sum + pair.images, 0));
      box.querySelector("[data-shown]").textContent =
        found.length > data.mostPairs
          ? `the ${data.mostPairs} most frequent of ${grouped(found.length)} pairs`
          : counted(found.length, "pair");
      const rows = found.slice(0, data.mostPairs).map(({ label, answer, images, before }) => {
        const row = element("tr");
        const head = element("th", named(label), "name");
        head.scope = "row";
        const number = leading(images, { class: name(label), answer: name(answer) });
        row.append(head, element("td", named(answer), "name"), element("td", number, "number"));
        if ("before" in box.dataset) row.append(element("td", grouped(before), "number"));
        return row;
      });
      box.querySelector("tbody").replaceChildren(...rows);
      box.querySelector(".scroll").hidden = !found.length;
      sortAgain(box.querySelector("table"));
    }
  };
  // How many of a gallery's images are in sight, and a button for the others.
  const tellShown = (gallery, total) => {
    const kind = gallery.dataset.gallery;
    const cards = gallery.children.length;
    const shown = gallery.classList.contains("short") ? Math.min(cards, FEW) : cards;
    const more = document.querySelector(`[data-more="${kind}"]`);
    more.textContent = `Show ${cards < total ? grouped(cards) : `all ${grouped(total)}`}`;
    more.hidden = shown === cards;
    const query = { change: kind };
    const only = document.querySelector(`[data-only="${kind}"]`).value;
    if (only !== "") query.part = data.parts[only];
    const told = document.querySelector(`[data-of="${kind}"]`);
    told.replaceChildren(sets ? leading(total, query, counted(total, "image")) : counted(total, "image"));
    if (shown < total) told.append(element("span", `; ${grouped(shown)} are shown`, "screen-only"));
    if (Math.min(cards, PRINTED) < total) told.append(element("span", `; ${Math.min(cards, PRINTED)} are printed`, "print-only"));
    told.append(".");
  };
  const moveGalleries = (place, { now }) => {
    for (const gallery of all("[data-gallery]")) {
      const kind = gallery.dataset.gallery;
      const only = document.querySelector(`[data-only="${kind}"]`).value;
      const belongs = new Set(sets.select(new URLSearchParams({ change: kind }), place).filter((image) => only === "" || data.partOf[data.labels[image]] === Number(only)));
      const cards = data.galleries[kind].filter((image) => belongs.has(image)).slice(0, data.gallery);
      gallery.replaceChildren(...cards.map((image) => card(image, now[image], { change: kind })));
      gallery.dataset.total = belongs.size;
      tellShown(gallery, belongs.size);
    }
  };
  // What a position of the dial gives up and wins, in images.
  const moveCost = (place) => {
    const cost = document.getElementById("cost");
    const here = place === data.saved;
    if (here && data.before === null) return;
    const [lost, won] = (here ? ["forgotten", "gained"] : ["lost", "won"]).map((kind) => [kind, sets.select(new URLSearchParams({ change: kind }), place)]);
    const kind = (images) => (images.every(sets.isOld) ? "old " : images.every((image) => !sets.known(image)) ? "new " : "");
    const part = (verb, [change, images]) => leading(images.length, { change }, `${verb} ${grouped(images.length)} ${images.length ? kind(images) : ""}${images.length === 1 ? "image" : "images"}`);
    cost.replaceChildren(here ? "Since before the last step: " : "Compared with the saved point: ", part("gives up", lost), ", ", part("wins", won), ".");
  };
  const draw = () => {
    const place = point();
    const counts = tally(place);
    moveTitle(counts);
    moveClasses(counts);
    moveParts(counts);
    movePairs(counts);
    moveGalleries(place, counts);
    if (dial) moveCost(place);
    view.follow();
  };

  // The dial.

  let waiting = false;
  const trail = []; // points that the dial rested at
  const move = () => {
    const place = point();
    moveFigures(place);
    moveCursors(place);
    document.getElementById("reset").disabled = place === data.saved;
    onMove?.(place);
    if (!sets || waiting) return;
    waiting = true; // accuracies at once, tables and images when the browser next draws
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  };
  const settle = () => {
    if (trail.at(-1) !== point()) trail.push(point());
    document.getElementById("undo").disabled = trail.length < 2;
    writePage();
    const classes = document.getElementById("classes");
    if (classes) requestAnimationFrame(() => sortAgain(classes)); // after the numbers have moved
  };
  const to = (place) => {
    slider.value = place;
    move();
    settle();
  };
  // The chart: its points are buttons, reached by the pointer, or by Tab and the arrow keys.
  const choose = (place) => {
    to(place);
    if (sets) requestAnimationFrame(() => view.open({ change: place === data.saved ? "forgotten" : place > data.saved ? "won" : "lost" }));
  };
  const centre = (shape) => {
    const box = shape.getBoundingClientRect();
    return [box.left + box.width / 2, box.top + box.height / 2];
  };
  const clicked = (event) => {
    const mark = event.target.closest("[data-point]");
    if (mark) return choose(Number(mark.dataset.point));
    const away = dots.map((dot) => Math.hypot(centre(dot)[0] - event.clientX, centre(dot)[1] - event.clientY));
    const nearest = away.indexOf(Math.min(...away));
    if (away[nearest] < 30) choose(Number(dots[nearest].parentNode.dataset.point));
  };
  const walk = (event) => {
    const mark = event.target.closest("[data-point]");
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const place = dots.findIndex((dot) => dot.parentNode === mark);
    if (place < 0 || !(step || event.key === "Enter" || event.key === " ")) return;
    event.preventDefault();
    if (!step) return choose(Number(mark.dataset.point));
    const next = dots[place + step]?.parentNode;
    if (!next) return;
    mark.setAttribute("tabindex", -1);
    next.setAttribute("tabindex", 0);
    next.focus();
  };
  const dressChart = (chart) => {
    chart.setAttribute("role", "group");
    chart.addEventListener("click", clicked);
    chart.addEventListener("keydown", walk);
    for (const dot of dots) {
      dot.parentNode.setAttribute("role", "button");
      dot.parentNode.setAttribute("aria-label", dot.parentNode.querySelector("title").textContent);
    }
  };
  if (dial) {
    dial.hidden = false;
    all("tr.live").forEach((row) => (row.hidden = false));
    slider.addEventListener("input", move);
    slider.addEventListener("change", settle);
    dial.addEventListener("submit", (event) => event.preventDefault());
    document.getElementById("reset").addEventListener("click", () => to(data.saved));
    document.getElementById("undo").addEventListener("click", () => {
      trail.pop();
      if (trail.length) to(trail.at(-1));
    });
    for (const each of all("button.go, button.chip")) each.addEventListener("click", () => to(Number(each.dataset.point)));
    all(".plot > svg").forEach(dressChart);
    const first = start ?? data.saved;
    slider.value = first;
    trail.push(first);
    move();
  }
  for (const gallery of all("[data-gallery]")) {
    const more = document.querySelector(`[data-more="${gallery.dataset.gallery}"]`);
    more.addEventListener("click", () => {
      gallery.classList.remove("short");
      tellShown(gallery, Number(gallery.dataset.total));
    });
    if (!sets) tellShown(gallery, Number(gallery.dataset.total));
  }
  for (const select of all("[data-only]"))
    select.addEventListener("change", () => {
      moveGalleries(point(), tally(point()));
      writePage();
    });
  for (const input of all("[type=search]")) input.oninput = () => writePage(input.closest("section").id);
  for (const table of all("table.sortable")) table.addEventListener("sorted", () => writePage(table.closest("section").id));
  if (sets) draw();
  window.onhashchange = readPage;
  if (location.hash) readPage();
  return { point, to };
};

const embedded = document.getElementById("data");
if (embedded) showReport(JSON.parse(embedded.textContent));
