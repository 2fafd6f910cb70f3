"use strict";
// What all pages share: elements, numbers, tables. Names are only ever set as text.

const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const element = (tag, content, name) => {
  const made = document.createElement(tag);
  if (content !== undefined) made.append(content);
  if (name) made.className = name;
  return made;
};
const button = (words, name, work) => {
  const made = element("button", words, name);
  made.type = "button";
  if (work) made.addEventListener("click", work);
  return made;
};
// One digit; halves are rounded to even, as Python does.
const digit = (value) => ((4 * value) % 4 === 1 ? value - 0.01 : value).toFixed(1);
const percent = (share) => (share === null || share === undefined ? "–" : digit(100 * share));
const grouped = (number) => number.toLocaleString("en-US");
const counted = (number, thing, several = `${thing}s`) => `${grouped(number)} ${number === 1 ? thing : several}`;
const signed = (number) => (number ? (number > 0 ? "+" : "\u2212") + grouped(Math.abs(number)) : "±0");
// The difference of the numbers as they are shown.
const change = (from, to) => {
  const points = (Number(percent(to)) - Number(percent(from))).toFixed(1);
  return Number(points) ? (Number(points) > 0 ? "+" : "\u2212") + points.replace("-", "") : "±0";
};
const announce = (words) => {
  const live = document.getElementById("live");
  if (live) live.textContent = words;
};
// A decision about chance, as `Changed.noise` in counts.py makes it.
const withinNoise = (lost, gained) => Math.max(Math.abs(lost - gained) - 1, 0) ** 2 < 3.84 * (lost + gained);

// Bars of shares that add up to one: the base plain, steps hatched.
const shareBar = (shares) => {
  const bar = element("div", undefined, "shares");
  bar.setAttribute("aria-hidden", "true");
  shares.forEach((share, n) => {
    const piece = element("i", undefined, n ? "step" : "");
    piece.style.width = `${100 * (share ?? 0)}%`;
    bar.append(piece);
  });
  return bar;
};

// The address names the view: #section?at=3&find=robin&sort=classes.2.down, or #images?class=robin&at=3.
const readAddress = () => {
  const [, name = "", query] = (location.hash || "#").match(/^#(?:([\w-]+)(?:\?|$))?(.*)$/);
  return { name, query: new URLSearchParams(query) };
};
const writeAddress = (name, query) => {
  const hash = [name, query.toString()].filter(Boolean).join("?");
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
};

// What a search found, below its field.
const tellMatches = (input, words, found) => {
  const told = input.closest(".controls").nextElementSibling;
  const clear = () => {
    input.value = "";
    input.dispatchEvent(new Event("input", { bubbles: true }));
    input.focus();
  };
  told.replaceChildren(...(found || !input.value.trim() ? [words] : [`No class matches “${input.value.trim()}”. `, button("Clear the search", "pick", clear)]));
};

// Tables: sorted by their headings; reachable by keyboard, with a hint, where columns are out of sight.

const sortKey = (row, column) => {
  const cell = row.cells[column];
  const words = cell.textContent.trim();
  if (!cell.classList.contains("number")) return words;
  const number = parseFloat(cell.dataset.value ?? words.replace(/[,+±]/g, "").replace("\u2212", "-"));
  return Number.isNaN(number) ? null : number;
};
const sortBy = (table, column, down) => {
  const sign = down ? -1 : 1;
  const keyed = [...table.tBodies[0].rows].map((row) => [sortKey(row, column), row]);
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
const watchWidth = (box) => {
  const table = box.querySelector("table");
  const look = () => {
    const wide = table.offsetWidth > box.clientWidth + 1;
    box.classList.toggle("wide", wide);
    if (!wide) for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
    else {
      box.tabIndex = 0;
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", `Table that scrolls sideways: ${table.caption?.textContent.trim().slice(0, 80) ?? ""}`);
    }
  };
  new ResizeObserver(look).observe(box);
  new ResizeObserver(look).observe(table);
};
const dressTables = () => {
  for (const table of all("table.sortable")) {
    all("thead th", table).forEach((th, column) => {
      th.querySelector("button")?.addEventListener("click", () => {
        const now = th.getAttribute("aria-sort");
        // Words start with A, numbers with the largest; a second press reverses the order.
        const down = now ? now === "ascending" : th.classList.contains("number");
        sortBy(table, column, down);
        table.dataset.sorted = `${column}${down ? ".down" : ""}`;
        table.dispatchEvent(new CustomEvent("sorted", { bubbles: true }));
      });
    });
  }
  all(".scroll").forEach(watchWidth);
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
    const rows = [...classes.tBodies[0].rows];
    for (const row of rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
    const found = rows.filter((row) => !row.hidden).length;
    classes.closest(".scroll").hidden = !found;
    tellMatches(event.target, wanted ? `${grouped(found)} of ${counted(rows.length, "class", "classes")}` : "", found);
  });
};
