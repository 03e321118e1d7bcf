// The list of runs: a real table in which only the visible rows exist, so that thousands scroll smoothly.
// Everything from a record is set as text, never as HTML.

const { commas, figure, isNumber, node } = window.Paceline;
const count = (value) => (isNumber(value) ? commas(value) : "");
const fixed = (value) => (isNumber(value) ? figure(value) : "");

export const COLUMNS = [
  { key: "name", title: "run", first: 1 },
  { key: "status", title: "status", first: 1 },
  { key: "when", title: "started", show: (value) => ago(value), first: -1 },
  { key: "accuracy", title: "accuracy", show: fixed, first: -1 },
  { key: "loss", title: "loss", show: fixed, first: 1 },
  { key: "samples_per_s", title: "samples/s", show: count, first: -1 },
  { key: "steps", title: "steps", show: count, first: -1 },
  { key: "workers", title: "P", show: count, first: -1, about: "workers: processes, each with one device" },
  { key: "virtual_workers", title: "V", show: count, first: -1, about: "virtual workers: parts of a global batch" },
  { key: "global_batch", title: "global batch", show: count, first: -1, about: "samples per step" },
  { key: "optimizer", title: "optimizer", first: 1 },
  { key: "task", title: "task", first: 1 },
];

const WHEN = COLUMNS.findIndex((column) => column.key === "when");
const OVERSCAN = 12; // rows above and below the visible ones
const MINUTE_MS = 60000; // how often the age of runs is updated
const TAIL = 11; // characters at the end of a long name that are always shown: runs of one task differ only in their time

/** Make the list. The user's actions call `on.toggle(id)`, `on.only(id)` and `on.sort(key)`. */
export function makeRows(frame, on) {
  const table = frame.querySelector("table");
  const body = table.tBodies[0];
  let shown = []; // the summaries, in order
  let chosen = new Map(); // id -> color
  let active = null; // the id of the row that Tab focuses
  let rows = new Map(); // id -> {tr, summary}
  const above = spacer();
  const below = spacer();
  const heads = makeHeads(table.tHead.rows[0], on.sort);

  function draw() {
    const height = rowHeight();
    const top = Math.max(0, Math.floor(frame.scrollTop / height) - OVERSCAN);
    const bottom = Math.min(shown.length, top + Math.ceil(frame.clientHeight / height) + 2 * OVERSCAN);
    const inView = shown.slice(top, bottom);
    const ids = new Set(inView.map((summary) => summary.id));
    const focused = body.contains(document.activeElement) ? document.activeElement.closest("tr").dataset.id : null;
    for (const [id, row] of rows) {
      if (!ids.has(id)) {
        row.tr.remove();
        rows.delete(id);
      }
    }
    if (!ids.has(active)) active = inView.length ? (shown[Math.floor(frame.scrollTop / height)] || inView[0]).id : null;
    above.firstChild.style.height = `${top * height}px`;
    below.firstChild.style.height = `${(shown.length - bottom) * height}px`;
    let before = above;
    inView.forEach((summary, index) => {
      const row = rows.get(summary.id) || makeRow(summary.id);
      if (row.summary !== summary) fill(row, summary);
      mark(row, top + index);
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
    const name = node("span", { class: "run-name" });
    const sub = node("small");
    const badge = node("span");
    const inner = { name: [name, sub], status: [badge] };
    const cells = COLUMNS.map(({ key }) => cell(key === "name" ? "th" : "td", key, ...(inner[key] || [])));
    cells[0].scope = "row";
    const tr = node("tr", { "data-id": id }, cell("td", "pick", box), ...cells);
    const row = { tr, box, cells, name, sub, badge, summary: null };
    rows.set(id, row);
    return row;
  }

  function mark(row, index) {
    const color = chosen.get(row.summary.id);
    row.tr.setAttribute("aria-rowindex", index + 2);
    row.tr.classList.toggle("is-chosen", color !== undefined);
    row.tr.style.setProperty("--color", color || "transparent");
    row.box.checked = color !== undefined;
    row.box.tabIndex = row.summary.id === active ? 0 : -1;
  }

  function rowHeight() {
    return parseFloat(getComputedStyle(frame).getPropertyValue("--row")) || 38;
  }

  function move(to, focus = true) {
    if (!shown.length) return;
    const index = Math.max(0, Math.min(shown.length - 1, to));
    active = shown[index].id;
    const height = rowHeight();
    const head = table.tHead.offsetHeight;
    if (index * height < frame.scrollTop) frame.scrollTop = index * height;
    const end = (index + 1) * height + head - frame.clientHeight;
    if (end > frame.scrollTop) frame.scrollTop = end;
    draw();
    if (focus) rows.get(active).box.focus({ preventScroll: true });
  }

  body.addEventListener("change", (event) => on.toggle(event.target.closest("tr").dataset.id));
  body.addEventListener("click", (event) => {
    const tr = event.target.closest("tr[data-id]");
    if (!tr || event.target.matches("input")) return;
    active = tr.dataset.id;
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.target.closest(".c-pick")) on.toggle(active);
    else on.only(active);
  });
  body.addEventListener("focusin", (event) => (active = event.target.closest("tr").dataset.id));
  frame.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const at = shown.findIndex((summary) => summary.id === active);
    const page = Math.max(1, Math.floor(frame.clientHeight / rowHeight()) - 2);
    const steps = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: shown.length - 1 };
    const inBody = body.contains(event.target) || event.target === frame;
    if (inBody && event.key in steps) move(steps[event.key]);
    else if (inBody && event.key === "Enter" && active !== null) on.only(active);
    else return;
    event.preventDefault();
  });
  let waiting = false;
  frame.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  });
  new ResizeObserver(draw).observe(frame);
  const tick = () => document.hidden || rows.forEach(showAge);
  setInterval(tick, MINUTE_MS);
  document.addEventListener("visibilitychange", tick);
  body.replaceChildren(above, below);

  return {
    /** Show these summaries in this order; `colors` has those that are selected, `unit` is what samples are called. */
    show(summaries, colors, sort, unit) {
      shown = summaries;
      chosen = colors;
      for (const [key, th] of heads) {
        th.setAttribute("aria-sort", key !== sort.key ? "none" : sort.way > 0 ? "ascending" : "descending");
      }
      heads.get("samples_per_s").firstChild.textContent = `${unit}/s`;
      draw();
    },
    /** Change the colors of the selected runs. */
    recolor(colors) {
      chosen = colors;
      draw();
    },
    focusFirst() {
      move(Math.max(0, shown.findIndex((summary) => summary.id === active)));
    },
  };
}

/** How long ago, in the largest unit that fits. */
export function ago(when) {
  const then = Date.parse(when);
  if (!Number.isFinite(then)) return "";
  const seconds = Math.max(0, (Date.now() - then) / 1000);
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= size) return `${commas(Math.floor(seconds / size))} ${unit} ago`;
  }
  return "just now";
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

function fill(row, summary) {
  row.summary = summary;
  row.box.setAttribute("aria-label", `Compare ${summary.name}`);
  const cut = Math.max(0, summary.name.length - TAIL);
  row.name.replaceChildren(node("span", {}, summary.name.slice(0, cut)), node("span", {}, summary.name.slice(cut)));
  row.name.title = summary.name;
  row.tr.classList.toggle("by-loss", !isNumber(summary.accuracy) && isNumber(summary.loss));
  const total = summary.status === "running" && summary.total_steps && summary.steps ? summary.steps / summary.total_steps : null;
  row.badge.className = `badge ${summary.tone || "plain"}`;
  row.badge.textContent = summary.status + (total === null ? "" : ` ${Math.floor(100 * Math.min(1, total))}%`);
  row.badge.title = summary.note || summary.why || "";
  COLUMNS.forEach((column, index) => {
    if (index < 2) return;
    const value = summary[column.key];
    const said = column.show ? column.show(value) : value || "";
    setText(row.cells[index], said);
    if (column.key === "when" || !column.show) row.cells[index].title = value || "";
  });
  showAge(row);
}

/** Show how long ago a run started: in its cell, and under its name on a phone, which has no such cell. */
function showAge({ summary, sub, cells }) {
  const age = ago(summary.when);
  const facts = [summary.kind === "train" ? null : summary.kind, age, summary.workers && `P ${summary.workers}`, summary.task];
  setText(sub, facts.filter(Boolean).join(" · "));
  setText(cells[WHEN], age);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function cell(tag, name, ...inner) {
  return node(tag, { class: `c-${name}` }, ...inner);
}

function spacer() {
  return node("tr", { class: "spacer", "aria-hidden": "true" }, node("td"));
}
