// Images of the report: sets of them at an operating point, and a window to look at them.

// Every image's answer at every point, and sets of images. A set is described by the parameters of a link:
// class and answer (names), part and as (parts; as=right), change (forgotten, gained, lost, won).
const CHANGES = {
  forgotten: "forgotten: right before the last step, wrong now",
  gained: "gained: right now, not before",
  lost: "given up compared with the saved point",
  won: "won compared with the saved point",
};
const OPPOSITE = { forgotten: "gained", gained: "forgotten", lost: "won", won: "lost" };
const imageSets = (data) => {
  const overlap = data.parts.length - 1;
  const at = ({ first, image, value, point: points }, point) => {
    const values = Int32Array.from(first);
    for (let n = 0; n < points.length && points[n] <= point; n++) values[image[n]] = value[n];
    return values;
  };
  const kept = new Map();
  const answers = (point) => {
    if (!kept.has(point)) {
      if (kept.size > 8) kept.clear();
      kept.set(point, at(data.answers, point));
    }
    return kept.get(point);
  };
  const saved = data.saved ?? 0;
  const { labels, before, partOf } = data;
  const everyone = labels.map((_, image) => image);
  const known = (image) => before !== null && labels[image] < data.known;
  const wasRight = (image) => known(image) && before[image] === labels[image];
  const isOld = (image) => known(image) && partOf[labels[image]] !== overlap;
  const changed = {
    forgotten: (image, right) => wasRight(image) && !right,
    gained: (image, right) => !wasRight(image) && right,
    lost: (image, right) => !right && answers(saved)[image] === labels[image],
    won: (image, right) => right && answers(saved)[image] !== labels[image],
  };
  // The images of a set at a point, mistakes first.
  const select = (query, point) => {
    const now = answers(point);
    const has = (key) => query.has(key);
    const number = (key) => data.classes.indexOf(query.get(key));
    const [label, answer] = [number("class"), number("answer")];
    const [of, as] = [data.parts.indexOf(query.get("part")), data.parts.indexOf(query.get("as"))];
    const found = everyone.filter((image) => {
      const right = now[image] === labels[image];
      return (
        (!has("class") || labels[image] === label) &&
        (!has("answer") || now[image] === answer) &&
        (!has("part") || partOf[labels[image]] === of) &&
        (!has("as") || (query.get("as") === "right" ? right : !right && partOf[now[image]] === as)) &&
        (!has("change") || changed[query.get("change")]?.(image, right))
      );
    });
    return [...found.filter((image) => now[image] !== labels[image]), ...found.filter((image) => now[image] === labels[image])];
  };
  const title = (query, count) => {
    const images = counted(count, "image");
    const get = (key) => query.get(key);
    if (get("answer") !== null) return `${images} of “${get("class")}” answered with “${get("answer")}”`;
    if (get("class") !== null) return `${images} of “${get("class")}”`;
    const of = get("part") === null ? images : `${images} of ${get("part")} classes`;
    if (get("as") !== null) return `${of}, ${get("as") === "right" ? "right" : `wrong, as ${get("as")}`}`;
    return `${of} ${CHANGES[get("change")] ?? ""}`;
  };
  return { answers, branches: (point) => at(data.branches, point), select, title, wasRight, isOld, known, overlap };
};

// One set of images in a window of its own: a large image with its answers, and all others to choose from.
const imageView = ({ data, sets, point, picture, available, verdicts, named, thumbnails, explain, pageQuery }) => {
  const MOST = 150;
  const KEYS = ["class", "answer", "part", "as", "change", "image", "why"]; // of a set in the address
  document.getElementById("view")?.remove();
  const dialog = element("dialog");
  dialog.id = "view";
  dialog.tabIndex = -1;
  dialog.setAttribute("aria-labelledby", "view-title");
  document.body.append(dialog);
  let query = null;
  let images = [];
  let current = 0;
  let drawnAt = 0; // the point of the dial

  let under = ""; // the section below the window
  const write = () => writeAddress("images", new URLSearchParams([...query, ...pageQuery()]));
  const close = () => dialog.open && dialog.close();
  dialog.addEventListener("close", () => {
    query = null;
    if (readAddress().name === "images") writeAddress(under, pageQuery());
  });
  dialog.addEventListener("click", (event) => event.target === dialog && close());
  dialog.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!step || !images.length || event.target.matches("input, select")) return;
    event.preventDefault();
    show(Math.min(Math.max(current + step, 0), images.length - 1));
  });

  const shares = (values, note = "") => {
    const box = element("div");
    const words = values.map((share, n) => `${n ? "◆" : "○"} ${data.branchNames[n]} ${percent(share)}%`).join(" · ");
    box.append(element("p", `Share of each branch${note}`, "note"), shareBar(values), element("p", words));
    return box;
  };
  const details = async (image, box) => {
    const wanted = `${image} ${point()}`;
    box.dataset.of = wanted;
    const kept = thumbnails[image]?.shares;
    if (!explain) {
      if (kept && kept.length > 1 && point() === data.saved) box.replaceChildren(shares(kept));
      return;
    }
    const right = sets.answers(point())[image] === data.labels[image];
    const expected = query.get("why") ?? (right ? null : data.classes[data.labels[image]]);
    const found = await explain(image, null);
    if (box.dataset.of !== wanted || !found) return;
    const parts = found.branches.length > 1 ? [shares(found.branches.map((branch) => branch.share))] : [];
    const asked = async (expect) => {
      if (expect !== expected) {
        query?.set("why", expect);
        if (query) write();
      }
      return (await explain(image, expect)).why;
    };
    box.replaceChildren(...parts, whyForm(expected, asked));
  };
  const show = (number) => {
    current = number;
    const image = images[number];
    if (query.get("image") !== String(image)) query.delete("why");
    query.set("image", image);
    write();
    const now = sets.answers(point())[image];
    const large = dialog.querySelector(".large");
    const words = element("div", element("h3", named(data.labels[image])), "said");
    words.append(...verdicts(image, now));
    const file = thumbnails[image]?.file;
    if (file) words.append(element("p", file, "file"));
    const more = element("div");
    words.append(more);
    large.replaceChildren(picture(image), words);
    details(image, more);
    dialog.querySelector(".where").textContent = `${grouped(number + 1)} of ${grouped(images.length)}`;
    const [back, on] = all(".step", dialog);
    back.disabled = number === 0;
    on.disabled = number === images.length - 1;
    all(".strip button", dialog).forEach((each, n) => {
      if (n === number) each.setAttribute("aria-current", "true");
      else each.removeAttribute("aria-current");
    });
    dialog.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
    // A button that went away or is disabled gets no keys.
    if (!dialog.contains(document.activeElement) || document.activeElement.disabled) dialog.focus({ preventScroll: true });
  };
  const draw = () => {
    drawnAt = point();
    const wanted = Number(query.get("image") ?? NaN);
    const every = sets.select(query, point());
    images = every.filter(available).slice(0, MOST);
    const head = element("header");
    const title = element("h2", sets.title(query, every.length));
    title.id = "view-title";
    head.append(title, button("Close", "close", close));
    dialog.replaceChildren(head);
    const other = new URLSearchParams(query);
    other.delete("image");
    other.set("change", OPPOSITE[query.get("change")]);
    const others = query.has("change") && sets.select(other, point()).length;
    if (others) {
      const words = { forgotten: "forgotten", gained: "gained", lost: "given up", won: "won" }[other.get("change")];
      const change = () => {
        query = other;
        draw();
      };
      head.after(element("p", button(`See the ${counted(others, "image")} ${words}`, "pick", change), "note"));
    }
    if (images.length < every.length) {
      const why = available(every.find((image) => !available(image)) ?? -1) || images.length === MOST ? `The first ${grouped(images.length)} are shown.` : `${grouped(images.length)} of them are in this file; branchout serve shows all.`;
      head.after(element("p", why, "note"));
    }
    if (!images.length) {
      if (!every.length) dialog.append(element("p", "No image belongs here at this position of the dial.", "note"));
      write();
      return;
    }
    const walk = element("p", undefined, "controls");
    const where = element("span", "", "where");
    where.setAttribute("role", "status");
    walk.append(button("← previous", "step", () => show(current - 1)), where, button("next →", "step", () => show(current + 1)));
    const strip = element("ul", undefined, "strip");
    strip.append(
      ...images.map((image, n) => {
        const small = button(picture(image), "look", () => show(n));
        small.classList.toggle("mistaken", sets.answers(point())[image] !== data.labels[image]);
        return element("li", small);
      }),
    );
    dialog.append(element("div", undefined, "large"), walk, strip);
    show(Math.max(images.indexOf(wanted), 0));
  };
  return {
    close,
    // With an entry in the history of its own, so that Back closes it.
    open: (wanted) => {
      under = readAddress().name;
      location.hash = `images?${new URLSearchParams([...Object.entries(wanted), ...pageQuery()])}`;
    },
    write: () => query && write(),
    show: (wanted) => {
      query = new URLSearchParams([...wanted].filter(([key]) => KEYS.includes(key)));
      if (!dialog.open) dialog.showModal();
      draw();
    },
    follow: () => dialog.open && query && drawnAt !== point() && draw(),
  };
};

// "Why not robin?" about one image: a field for the class, and what `ask` answers about it.
const whyForm = (expected, ask) => {
  const form = element("form", undefined, "ask-why");
  const label = element("label", "Why not ");
  const input = element("input");
  input.setAttribute("list", "names-to-expect");
  input.placeholder = "a class";
  input.required = true;
  input.value = expected ?? "";
  label.append(input);
  const found = element("div");
  form.append(label, element("button", "Show why"));
  const answer = async () => {
    try {
      found.replaceChildren(whyTable(await ask(input.value.trim())));
      announce(found.querySelector(".note").textContent);
    } catch (error) {
      found.replaceChildren(element("p", `✗ ${error.message}`, "warn"));
    }
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    answer();
  });
  if (expected) answer();
  const box = element("div", form);
  box.append(found);
  return box;
};

// Why a class did not win: how both logits come about, and what the dial would change.
const whyTable = ({ winner, expected, place, dial_change: dialChange }) => {
  const box = element("div", undefined, "why");
  const name = () => element("bdi", expected.class);
  if (place === 1) {
    const won = element("p", name(), "note");
    won.append(` won, with ${percent(expected.probability)}%.`);
    box.append(won);
    return box;
  }
  const table = element("table");
  const head = element("tr");
  for (const words of ["class", "own logit", "+ other branches", "+ dial", "= logit"]) {
    const cell = element("th", words, words === "class" ? "name" : "number");
    cell.scope = "col";
    head.append(cell);
  }
  table.append(element("caption", "How the logits come about"), element("thead", head), element("tbody"));
  const number = (value) => value.toFixed(2).replace(/^-0\.00$/, "0.00").replace("-", "\u2212");
  // Parts are rounded first and then added, so that what is shown adds up.
  const parts = (score) => ["own", "delta", "dial"].map((part) => Number(score.parts[part].toFixed(2)));
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  for (const [score, note] of [[winner, " (won)"], [expected, ""]]) {
    const row = element("tr");
    const named = element("th", element("bdi", score.class), "name");
    named.scope = "row";
    named.append(note);
    row.append(named, ...[...parts(score), sum(parts(score))].map((value) => element("td", number(value), "number")));
    table.tBodies[0].append(row);
  }
  const signedNumber = (value) => (number(value)[0] === "\u2212" ? "" : "+") + number(value);
  const lead = parts(winner).map((value, n) => value - parts(expected)[n]);
  const [own, delta, dial] = lead.map(signedNumber);
  const words = element("p", undefined, "note");
  words.append(name(), ` is ranked ${grouped(place)} with ${percent(expected.probability)}%. `);
  words.append(element("bdi", winner.class), ` leads by ${number(sum(lead))}: own logits ${own}, other branches ${delta}, dial ${dial}. `);
  if (dialChange) words.append(`With the dial more than ${number(Math.abs(dialChange))} ${dialChange > 0 ? "higher" : "lower"} it would win.`);
  else if (dialChange === null) words.append("No position of the dial makes it win.");
  const title = element("h4", "Why not ");
  title.append(name(), "?");
  const scroll = element("div", table, "scroll");
  box.append(title, scroll, words);
  watchWidth(scroll);
  return box;
};
