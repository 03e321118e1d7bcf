// The list of runs: a real table in which only the visible rows exist, so that thousands scroll smoothly.
// Everything from a record is set as text, never as HTML.

import { COLUMNS, ago, metricOf, workers } from "./columns.js";

const { node, twoParts } = window.Paceline;

const OVERSCAN_PX = 450; // rows are drawn this far above and below the visible ones
const MINUTE_MS = 60000; // how often the age of runs is updated

/**
 * Make the list. The user's actions call `on.toggle(line)`, `on.only(line)`, `on.fold(line, open)` and `on.sort(key)`; `on.link(id)`
 * gives the address that shows a record.
 */
export function makeRows(frame, on) {
  const table = frame.querySelector("table");
  const body = table.tBodies[0];
  let shown = []; // the lines, in order
  let at = new Map(); // id -> place in `shown`
  let tops = [0]; // where each line begins, in px; the last is where the list ends
  let chosen = new Map(); // id -> color
  let active = null; // the id of the row that Tab focuses
  let rows = new Map(); // id -> the parts of its row
  const above = spacer();
  const below = spacer();
  const heads = makeHeads(table.tHead.rows[0], on.sort);

  function measure() {
    const style = getComputedStyle(frame);
    const [plain, tall] = ["--row", "--tall"].map((name) => parseFloat(style.getPropertyValue(name)));
    tops = [0];
    for (const line of shown) tops.push(tops[tops.length - 1] + (line.second ? tall : plain));
  }

  /** The place of the line at this height. */
  function placeAt(px) {
    let [low, high] = [0, shown.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tops[middle + 1] <= px) low = middle + 1;
      else high = middle;
    }
    return Math.min(low, Math.max(0, shown.length - 1));
  }

  function draw() {
    const first = shown.length ? placeAt(frame.scrollTop - OVERSCAN_PX) : 0;
    const end = shown.length ? placeAt(frame.scrollTop + frame.clientHeight + OVERSCAN_PX) + 1 : 0;
    const inView = shown.slice(first, end);
    const ids = new Set(inView.map((line) => line.id));
    const focused = body.contains(document.activeElement) ? document.activeElement.closest("tr").dataset.id : null;
    for (const [id, row] of rows) {
      if (!ids.has(id)) {
        row.tr.remove();
        rows.delete(id);
      }
    }
    if (!ids.has(active)) active = inView.length ? shown[placeAt(frame.scrollTop)].id : null;
    above.firstChild.style.height = `${tops[first]}px`;
    below.firstChild.style.height = `${tops[shown.length] - tops[end]}px`;
    let before = above;
    inView.forEach((line, index) => {
      const row = rows.get(line.id) || makeRow(line.id);
      if (row.line !== line) fill(row, line, on.link);
      mark(row, first + index);
      if (before.nextSibling !== row.tr) before.after(row.tr);
      before = row.tr;
    });
    if (before.nextSibling !== below) before.after(below);
    table.setAttribute("aria-rowcount", shown.length + 1);
    if (focused !== null && !rows.has(focused)) frame.focus({ preventScroll: true });
    else if (focused !== null && document.activeElement === document.body) rows.get(focused).box.focus({ preventScroll: true });
  }

  function makeRow(id) {
    const box = node("input", { type: "checkbox" });
    const fold = node("button", { type: "button", class: "fold" });
    const name = node("a", { class: "run-name two-parts", tabindex: "-1" });
    const [sub, second, badge] = [node("small", { class: "facts" }), node("small", { class: "second" }), node("span")];
    const inner = { name: [node("div", { class: "title" }, fold, name), sub, second], status: [badge] };
    const cells = COLUMNS.map(({ key }) => cell(key === "name" ? "th" : "td", key, ...(inner[key] || [])));
    cells[0].scope = "row";
    const tr = node("tr", { "data-id": id }, cell("td", "pick", box), ...cells);
    const row = { tr, box, fold, cells, name, sub, second, badge, line: null };
    rows.set(id, row);
    return row;
  }

  function mark(row, index) {
    const { id, members } = row.line;
    const color = chosen.get(id);
    const inside = members ? members.filter((each) => chosen.has(each)).length : 0;
    row.tr.setAttribute("aria-rowindex", index + 2);
    row.tr.classList.toggle("is-chosen", color !== undefined);
    row.tr.style.setProperty("--color", color || "transparent");
    row.box.checked = members ? inside === members.length : color !== undefined;
    row.box.indeterminate = inside > 0 && inside < members.length;
    row.box.tabIndex = row.fold.tabIndex = id === active ? 0 : -1;
  }

  function move(to) {
    if (!shown.length) return;
    const index = Math.max(0, Math.min(shown.length - 1, to));
    active = shown[index].id;
    const end = tops[index + 1] + table.tHead.offsetHeight - frame.clientHeight;
    if (tops[index] < frame.scrollTop) frame.scrollTop = tops[index];
    else if (end > frame.scrollTop) frame.scrollTop = end;
    draw();
    rows.get(active).box.focus({ preventScroll: true });
  }

  const lineOf = (element) => shown[at.get(element.closest("tr").dataset.id)];

  body.addEventListener("change", (event) => on.toggle(lineOf(event.target)));
  body.addEventListener("click", (event) => {
    if (!event.target.closest("tr[data-id]") || event.target.matches("input")) return;
    event.preventDefault(); // a link opens in this page, unless the middle button asks for a new tab
    const line = lineOf(event.target);
    active = line.id;
    if (event.target.closest(".fold")) on.fold(line, !line.open);
    else if (event.ctrlKey || event.metaKey || event.shiftKey || event.target.closest(".c-pick")) on.toggle(line);
    else on.only(line);
  });
  body.addEventListener("focusin", (event) => (active = event.target.closest("tr").dataset.id));
  frame.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const place = at.has(active) ? at.get(active) : 0;
    const line = shown[place];
    const page = frame.clientHeight - table.tHead.offsetHeight;
    const steps = {
      ...{ ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: shown.length - 1 },
      ...{ PageDown: Math.max(place + 1, placeAt(tops[place] + page) - 1), PageUp: Math.min(place - 1, placeAt(tops[place] - page) + 1) },
    };
    const inBody = body.contains(event.target) || event.target === frame;
    if (!inBody || !line) return;
    if (event.key in steps) move(steps[event.key]);
    else if (event.key === "Enter" && !event.target.matches("button")) on.only(line);
    else if (event.key === "ArrowRight" && line.members && !line.open) on.fold(line, true);
    else if (event.key === "ArrowLeft" && line.members && line.open) on.fold(line, false);
    else if (event.key === "ArrowLeft" && line.level) move(groupAbove(place));
    else return;
    event.preventDefault();
  });

  function groupAbove(place) {
    while (place > 0 && shown[place].level) place--;
    return place;
  }

  let waiting = false;
  frame.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  });
  new ResizeObserver(() => {
    measure();
    draw();
  }).observe(frame);
  const tick = () => document.hidden || rows.forEach(showAge);
  setInterval(tick, MINUTE_MS);
  document.addEventListener("visibilitychange", tick);
  body.replaceChildren(above, below);

  return {
    /**
     * Show these lines. `colors` has the records that are selected, `titles` the heads that depend on the runs. What the user reads
     * stays where it is while lines come and go above it; `fromTop` starts at the top instead, because the order is another one.
     */
    show(lines, colors, sort, titles, fromTop) {
      const top = frame.scrollTop;
      const [before, started] = [shown, tops];
      let place = placeAt(top);
      shown = lines;
      at = new Map(lines.map((line, index) => [line.id, index]));
      chosen = colors;
      measure();
      while (place >= 0 && before.length && !at.has(before[place].id)) place--;
      const moved = top > 0 && before.length && place >= 0 ? tops[at.get(before[place].id)] - started[place] : 0;
      for (const [key, th] of heads) {
        th.setAttribute("aria-sort", key !== sort.key ? "none" : sort.way > 0 ? "ascending" : "descending");
        if (titles[key]) setText(th.firstChild, titles[key]);
      }
      // The height first: a frame scrolls no further than to its end.
      above.firstChild.style.height = `${Math.max(tops[lines.length], top + frame.clientHeight)}px`;
      frame.scrollTop = fromTop ? 0 : Math.max(0, top + moved);
      draw();
    },
    /** Change the colors of the selected runs. */
    recolor(colors) {
      chosen = colors;
      draw();
    },
    focusFirst() {
      move(at.has(active) ? at.get(active) : 0);
    },
  };
}

function makeHeads(tr, sort) {
  const heads = new Map();
  tr.append(cell("td", "pick"));
  for (const column of COLUMNS) {
    const button = node("button", { type: "button", title: column.about, onclick: () => sort(column.key) }, column.title);
    const th = cell("th", column.key, button);
    th.scope = "col";
    tr.append(th);
    heads.set(column.key, th);
  }
  return heads;
}

function fill(row, line, link) {
  const changed = !row.line || row.line.summary !== line.summary || row.line.second !== line.second;
  const folds = line.members !== undefined;
  row.line = line;
  row.fold.hidden = !folds;
  if (folds) {
    row.fold.setAttribute("aria-expanded", line.open);
    row.fold.setAttribute("aria-label", `Runs of ${line.name}`);
  }
  if (!changed) return;
  const { summary } = line;
  row.box.setAttribute("aria-label", folds ? `Compare the runs of ${summary.name}` : `Compare ${summary.name}`);
  if (row.name.textContent !== line.name) row.name.replaceChildren(...twoParts(line.name));
  row.name.title = summary.name;
  row.name.href = link(line);
  row.tr.className = `level-${line.level}${folds ? " is-group" : ""}${line.second ? " is-tall" : ""}`;
  setText(row.second, line.second);
  row.second.title = line.second;
  row.second.classList.toggle("problem", !folds && Boolean(summary.note || summary.why));
  const total = summary.status === "running" && summary.total_steps && summary.steps ? summary.steps / summary.total_steps : null;
  row.badge.className = `badge ${summary.tone || "plain"}`;
  setText(row.badge, summary.status + (total === null ? "" : ` ${Math.floor(100 * Math.min(1, total))}%`));
  COLUMNS.forEach((column, index) => {
    if (index < 2) return;
    const value = summary[column.key];
    setText(row.cells[index], column.show ? column.show(summary) : value || "");
    if (column.key === "when" || !column.show) row.cells[index].title = value || "";
    if (column.key === "best" || column.key === "last") row.cells[index].dataset.metric = metricOf(summary) || "";
  });
  showAge(row);
}

/** Show how long ago a run started: in its cell, and under its name on a phone, which has no such cell. */
function showAge({ line: { summary }, sub, cells }) {
  const age = ago(summary.when);
  const count = workers(summary);
  setText(sub, [age, count && `P ${count}`, summary.task].filter(Boolean).join(" · "));
  setText(cells[WHEN], age);
}

const WHEN = COLUMNS.findIndex((column) => column.key === "when");

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function cell(tag, name, ...inner) {
  return node(tag, { class: `c-${name}` }, ...inner);
}

function spacer() {
  return node("tr", { class: "spacer", "aria-hidden": "true" }, node("td"));
}
