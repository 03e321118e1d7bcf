// The board: selection, sorting and filtering (all kept in the URL), and a stream of events that keeps the page up to date.
// rows.js draws the list; the report's scripts (window.Paceline) draw the selected runs.

import { COLUMNS, makeRows } from "./rows.js";

const { color, commas, key, node, unitOf } = window.Paceline;

const MOST = 24; // runs compared at once; the server has the same limit
const PATIENCE_MS = 60000; // a hidden page closes its connection after this: browsers allow six per server

const $ = (id) => document.getElementById(id);
const runs = new Map(); // id -> summary
const sources = new Map(); // id -> record, of the selected runs
const state = { run: [], sort: { key: "when", way: -1 }, q: "", status: "", x: "" };
let pending = 0;
let since = "";
let stream = null;
let drawn = false;
let headline = "";
let listed = false; // whether the list has arrived
let lost = ""; // the selected runs that are missing
let first = true; // whether the newest run may be selected, because the user selected none

const list = makeRows($("rows"), { toggle, only, sort: sortBy });

// --- the URL

function readAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  const key = (said.get("sort") || "-when").replace(/^-/, "");
  state.run = [...new Set(said.getAll("run"))].slice(0, MOST);
  state.sort = { key: COLUMNS.some((column) => column.key === key) ? key : "when", way: (said.get("sort") || "-when").startsWith("-") ? -1 : 1 };
  state.q = said.get("q") || "";
  state.status = said.get("status") || "";
  state.x = said.get("x") || "";
  $("filter").value = state.q;
}

function writeAddress() {
  const said = new URLSearchParams();
  for (const id of state.run) said.append("run", id);
  const sort = (state.sort.way < 0 ? "-" : "") + state.sort.key;
  if (sort !== "-when") said.set("sort", sort);
  for (const name of ["q", "status", "x"]) if (state[name]) said.set(name, state[name]);
  history.replaceState(null, "", `${location.pathname}#${said}`); // without the token, which is now in a cookie
}

// --- user actions

function toggle(id) {
  const chosen = state.run.includes(id);
  if (!chosen && state.run.length >= MOST) {
    say(`At most ${MOST} runs can be compared: remove one first`);
    drawList();
    return;
  }
  choose(chosen ? state.run.filter((each) => each !== id) : [...state.run, id]);
}

function only(id) {
  choose([id]);
}

function choose(ids) {
  state.run = ids;
  for (const id of sources.keys()) if (!ids.includes(id)) sources.delete(id);
  writeAddress();
  drawList();
  drawReport();
  connect();
}

function sortBy(key) {
  const column = COLUMNS.find((each) => each.key === key);
  state.sort = { key, way: state.sort.key === key ? -state.sort.way : column.first };
  writeAddress();
  drawList();
}

$("filter").addEventListener("input", () => {
  state.q = $("filter").value;
  writeAddress();
  drawList();
});
$("filter").addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "Enter") {
    event.preventDefault();
    list.focusFirst();
  }
});
$("status").addEventListener("change", () => {
  state.status = $("status").value;
  writeAddress();
  drawList();
});
$("order").append(...COLUMNS.map((column) => new Option(`by ${column.title}`, column.key)));
$("order").addEventListener("change", () => {
  state.sort = { key: "", way: 1 };
  sortBy($("order").value);
});
document.querySelector(".find").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=checkbox]), select, textarea")) return;
  event.preventDefault();
  $("filter").focus();
  $("filter").select();
});
addEventListener("hashchange", () => {
  const before = state.run.join("\n");
  readAddress();
  drawList();
  if (state.run.join("\n") !== before) choose(state.run);
  else useAxis();
});

// --- the stream

function connect() {
  if (stream) stream.close();
  const asked = new URLSearchParams();
  if (since) asked.set("since", since);
  for (const id of state.run) asked.append("run", id);
  stream = new EventSource(`events?${asked}`);
  stream.addEventListener("open", () => showLink("live", "live"));
  stream.addEventListener("error", () => {
    showLink("lost", "no connection: is the board still running? It may have a new address");
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  });
  stream.addEventListener("runs", (event) => takeRuns(event.lastEventId, JSON.parse(event.data)));
  stream.addEventListener("source", (event) => takeSource(JSON.parse(event.data)));
  stream.addEventListener("rows", (event) => takeRows(JSON.parse(event.data)));
}

function takeRuns(id, change) {
  since = id;
  listed = true;
  pending = change.pending;
  if (change.whole) runs.clear();
  for (const gone of change.removed) runs.delete(gone);
  for (const summary of change.changed) runs.set(summary.id, summary);
  if (first && runs.size && !state.run.length && !location.hash.includes("=")) {
    const newest = [...runs.values()].sort(by({ key: "when", way: -1 }));
    only((newest.find((summary) => summary.status === "running") || newest[0]).id);
  }
  first = first && !runs.size;
  soon(drawList);
  if (String(missing()) !== lost) soon(drawReport);
}

/** The selected runs that cannot be shown: they are not in the list, or the list says why they cannot be read. */
function missing() {
  if (!listed || pending) return [];
  return state.run.filter((id) => !sources.has(id) && (!runs.has(id) || runs.get(id).note));
}

function takeSource(change) {
  headline = change.headline;
  if (!state.run.includes(change.id)) return;
  if (change.source) sources.set(change.id, change.source);
  else sources.delete(change.id);
  soon(drawReport);
}

function takeRows(change) {
  const source = sources.get(change.id);
  if (!source) return;
  headline = change.headline;
  Object.assign(source, { last: change.last, summary: change.summary, notes: source.notes.concat(change.notes) });
  for (const [kind, columns] of Object.entries(change.rows)) append(source.series[kind], columns);
  soon(drawReport);
}

/** Append rows, given as columns. The server sends every row once: in the complete record, or after it. */
function append(table, columns) {
  const length = (columns_) => Math.max(0, ...Object.values(columns_).map((column) => column.length));
  const before = length(table), added = length(columns);
  for (const name of new Set([...Object.keys(table), ...Object.keys(columns)])) {
    const column = table[name] || (table[name] = new Array(before).fill(null));
    column.push(...(columns[name] || new Array(added).fill(null)));
  }
}

function showLink(kind, text) {
  $("link").className = `badge ${kind === "live" ? "live" : "bad"}`;
  $("link").textContent = text;
}

let hiddenSince = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenSince);
  if (document.hidden) {
    hiddenSince = setTimeout(() => {
      stream.close();
      stream = null;
    }, PATIENCE_MS);
  } else if (!stream) connect();
});

// --- drawing

const due = new Set();

/** Draw soon, and only once for all events until then. */
function soon(draw) {
  if (due.has(draw)) return;
  due.add(draw);
  setTimeout(() => {
    due.delete(draw);
    draw();
  }, 50);
}

function by({ key, way }) {
  return (a, b) => {
    const [x, y] = [a[key], b[key]];
    const [hasX, hasY] = [x !== null && x !== undefined, y !== null && y !== undefined];
    if (!hasX || !hasY) return hasY - hasX || names.compare(a.name, b.name); // missing values come last in both directions
    const order = typeof x === "number" && typeof y === "number" ? x - y : names.compare(String(x), String(y));
    return way * order || names.compare(a.name, b.name);
  };
}

const names = new Intl.Collator("en", { numeric: true });

function drawList() {
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  const all = [...runs.values()];
  const found = all.filter((summary) => {
    if (state.status && summary.status !== state.status) return false;
    if (!words.length) return true;
    const text = [summary.name, summary.task, summary.model, summary.optimizer, summary.status, summary.kind].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  found.sort(by(state.sort));
  $("rows").classList.toggle("one-task", new Set(all.map((summary) => summary.task)).size < 2);
  list.show(found, colors(), state.sort, unitOf(all.filter((summary) => summary.unit)));
  $("order").value = state.sort.key;
  drawStatuses(all);
  drawEmpty(all.length, found.length);
  const shown = `${commas(found.length)} ${found.length === 1 ? "run" : "runs"} shown`;
  const of = found.length < all.length ? ` of ${commas(all.length)}` : "";
  const gone = missing().length;
  const chosen = state.run.length ? `, ${state.run.length - gone} selected${gone ? `, ${gone} missing` : ""}` : "";
  say(shown + of + chosen + (pending ? `, ${commas(pending)} not read yet` : ""));
  document.body.classList.toggle("has-chosen", state.run.length > 0);
}

function say(text) {
  if ($("count").textContent !== text) $("count").textContent = text;
}

function drawStatuses(all) {
  const counts = new Map();
  for (const summary of all) counts.set(summary.status, (counts.get(summary.status) || 0) + 1);
  if (state.status && !counts.has(state.status)) counts.set(state.status, 0);
  const options = [["", "any status"], ...[...counts].sort().map(([status, count]) => [status, `${status} (${commas(count)})`])];
  const now = JSON.stringify(options);
  if ($("status").dataset.options !== now) {
    $("status").dataset.options = now;
    $("status").replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  }
  $("status").value = state.status;
}

function drawEmpty(all, found) {
  const unread = !listed || pending > 0;
  $("rows").hidden = found === 0;
  $("none").hidden = all > 0 || unread;
  $("no-match").hidden = found > 0 || all === 0 || unread;
}

function drawReport() {
  const chosen = state.run.length > 0;
  const found = state.run.filter((id) => sources.has(id)).map((id) => sources.get(id));
  document.querySelector(".hero").hidden = !chosen;
  $("page").hidden = !chosen;
  const title = found.length === 1 ? found[0].name : `${found.length} records compared`;
  const gone = missing();
  const none = chosen && gone.length === state.run.length;
  $("title").textContent = found.length ? title : none ? runs.get(gone[0])?.name || "Not found" : chosen ? "Reading" : "";
  document.title = found.length ? `${title} · Paceline board` : "Paceline board";
  if (!found.length) headline = none ? reasons(gone) : "";
  if (drawn) window.Paceline.update(found, { headline });
  else if (found.length) {
    drawn = true;
    window.Paceline.render($("page"), found, { headline });
    useAxis();
  } else window.Paceline.headline(headline);
  drawChosen(); // in the colors that the page assigned
  if (String(gone) === lost) list.recolor(colors());
  else drawList(); // it says how many are selected
  lost = String(gone);
}

/** Why these runs are not shown. */
function reasons(ids) {
  const notes = ids.filter((id) => runs.has(id)).map((id) => (ids.length > 1 ? `${runs.get(id).name}: ` : "") + runs.get(id).note);
  return notes.join("; ") || "The runs named in the URL are not in this folder, or were removed.";
}

function drawChosen() {
  $("chosen").hidden = state.run.length === 0;
  $("chosen-label").textContent = state.run.length === 1 ? "Shown" : "Compared";
  $("save").hidden = missing().length === state.run.length;
  $("save").href = `report?${new URLSearchParams(state.run.map((id) => ["run", id]))}`;
  const sign = JSON.stringify(state.run.map((id) => [id, runs.has(id) && runs.get(id).name, color(id), missing().includes(id)]));
  if ($("chosen").dataset.sign === sign) return; // a new button would miss a click that has begun
  $("chosen").dataset.sign = sign;
  const items = state.run.map((id) => {
    const name = runs.has(id) ? runs.get(id).name : id;
    const remove = node("button", { type: "button", "data-id": id, "aria-label": `Remove ${name}` }, "×");
    const away = missing().includes(id) ? node("small", {}, runs.has(id) ? "not read" : "missing") : null;
    return node("li", {}, key(id), node("span", { title: name }, name), away, remove);
  });
  const focused = document.activeElement && document.activeElement.closest("#chosen li") ? document.activeElement.dataset.id : null;
  document.querySelector("#chosen ul").replaceChildren(...items);
  if (focused === null) return;
  const again = [...document.querySelectorAll("#chosen li button")].find((button) => button.dataset.id === focused);
  (again || document.querySelector("#chosen li button") || $("filter")).focus();
}

/** The colors of the selected runs; gray for those that are not read yet. */
function colors() {
  return new Map(state.run.map((id) => [id, color(id) || "var(--line)"]));
}

// --- the x axis: its buttons are in the page, the URL remembers the selected one

function useAxis() {
  const button = state.x && document.querySelector(`[data-x="${CSS.escape(state.x)}"][aria-pressed="false"]`);
  if (button) button.click();
}

$("page").addEventListener("click", (event) => {
  const button = event.target.closest("[data-x]");
  if (!button || button.dataset.x === state.x) return;
  state.x = button.dataset.x;
  writeAddress();
});

// Links within the page scroll there, but must not change the URL, which holds the board's state.
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#"]');
  const to = link && document.getElementById(link.getAttribute("href").slice(1));
  if (!to) return;
  event.preventDefault();
  to.tabIndex = -1;
  to.focus();
  to.scrollIntoView({ block: "start" });
});

$("chosen").addEventListener("click", (event) => {
  const button = event.target.closest("li button");
  if (button) toggle(button.dataset.id);
});
$("clear").addEventListener("click", () => {
  choose([]);
  list.focusFirst();
});
$("clear-filter").addEventListener("click", () => {
  Object.assign(state, { q: "", status: "" });
  $("filter").value = "";
  writeAddress();
  drawList();
  $("filter").focus();
});
document.addEventListener("paceline:theme", () => {
  list.recolor(colors());
  drawChosen();
});
$("plotly").addEventListener("load", () => window.Paceline.redraw());

readAddress();
writeAddress();
drawList();
drawReport();
connect();
