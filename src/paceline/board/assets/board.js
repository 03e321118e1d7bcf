// The board: selection, sorting and filtering (all kept in the URL), and a stream of events that keeps the page up to date.
// lines.js groups, sorts and filters the records, rows.js draws the list; the report's scripts (window.Paceline) draw the selected runs.

import { makeAddress, readAddress } from "./address.js";
import { COLUMNS, metricOf } from "./columns.js";
import { commonFolder, commonMetric, findNewest, makeLines } from "./lines.js";
import { makeRows } from "./rows.js";

const { color, commas, key, node, twoParts, unitOf } = window.Paceline;

const MOST = 24; // runs compared at once; the server has the same limit
const PATIENCE_MS = 60000; // a hidden page closes its connection after this: browsers allow six per server

const $ = (id) => document.getElementById(id);
const runs = new Map(); // id -> summary
const sources = new Map(); // id -> record, of the selected runs
const state = readAddress(MOST);
const folded = new Map(); // id -> whether the user opened or closed this group, under the current filter
let pending = 0;
let since = "";
let stream = null;
let drawn = false;
let headline = "";
let listed = false; // whether the list has arrived
let warning = ""; // about the user's last action
let lost = ""; // the selected runs that are missing
let first = true; // whether the newest run may be selected, because the user selected none

const list = makeRows($("rows"), { toggle: toggleLine, only: onlyLine, fold, sort: sortBy, link });

// --- the URL

function useAddress() {
  Object.assign(state, readAddress(MOST));
  $("filter").value = state.q;
}

function writeAddress() {
  history.replaceState(null, "", location.pathname + makeAddress(state)); // without the token, which is now in a cookie
}

function link(line) {
  return makeAddress({ ...state, run: runs.has(line.id) ? [line.id] : line.members.slice(0, MOST) });
}

// --- user actions

function toggle(id) {
  const chosen = state.run.includes(id);
  if (!chosen && state.run.length >= MOST) {
    warn(`At most ${MOST} runs can be compared: remove one first`);
    return;
  }
  choose(chosen ? state.run.filter((each) => each !== id) : [...state.run, id]);
}

/** Select or deselect a run; of a group, all its runs. */
function toggleLine(line) {
  if (!line.members) {
    toggle(line.id);
    return;
  }
  const rest = state.run.filter((id) => !line.members.includes(id) && id !== line.id);
  const added = line.members.slice(0, Math.max(0, MOST - rest.length));
  choose(line.members.every((id) => state.run.includes(id)) || !added.length ? rest : [...rest, ...added]);
  if (added.length < line.members.length) warn(`At most ${MOST} runs can be compared: ${added.length} of these ${line.members.length} are selected`);
}

/** Show only this record. A folder without a record of its own opens instead. */
function onlyLine(line) {
  if (runs.has(line.id)) choose([line.id]);
  else fold(line, !line.open);
}

function fold(line, open) {
  folded.set(line.id, open);
  if (!isFiltered()) {
    state.open = open ? [...new Set([...state.open, line.id])] : state.open.filter((id) => id !== line.id);
    writeAddress();
  }
  drawList();
}

function isFiltered() {
  return state.q.trim() !== "" || state.status !== "";
}

function isOpen(id, otherwise) {
  return folded.has(id) ? folded.get(id) : otherwise || state.open.includes(id);
}

function choose(ids) {
  warning = "";
  state.run = ids;
  for (const id of sources.keys()) if (!ids.includes(id)) sources.delete(id);
  writeAddress();
  drawList();
  drawReport();
  connect();
}

function sortBy(key) {
  const column = COLUMNS.find((each) => each.key === key);
  const first = (key === "best" || key === "last") && commonMetric([...runs.values()]) === "loss" ? 1 : column.first; // the best come first
  state.sort = { key, way: state.sort.key === key ? -state.sort.way : first };
  writeAddress();
  drawList({ fromTop: true });
}

function filterBy(change) {
  Object.assign(state, change);
  folded.clear(); // what the user opened in another selection of runs says nothing about this one
  writeAddress();
  drawList({ fromTop: true });
}

$("filter").addEventListener("input", () => filterBy({ q: $("filter").value }));
$("filter").addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "Enter") {
    event.preventDefault();
    list.focusFirst();
  }
});
$("status").addEventListener("change", () => filterBy({ status: $("status").value }));
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
  useAddress();
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
  if (first && runs.size && !state.run.length && !location.hash.includes("=")) choose([findNewest([...runs.values()])]);
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

function drawList({ fromTop = false } = {}) {
  const all = [...runs.values()];
  const metric = commonMetric(all);
  const { lines, found, runs: total, hasGroups } = makeLines(all, { q: state.q, status: state.status, sort: state.sort, isOpen });
  $("rows").classList.toggle("one-task", new Set(all.map((summary) => summary.task)).size < 2);
  $("rows").classList.toggle("has-groups", hasGroups);
  $("rows").classList.toggle("two-metrics", all.some(metricOf) && !metric);
  const unit = unitOf(all.filter((summary) => summary.unit));
  const titles = { samples_per_s: `${unit}/s`, best: `best ${metric || ""}`.trim(), last: `last ${metric || ""}`.trim() };
  list.show(lines, colors(), state.sort, titles, fromTop);
  $("order").value = state.sort.key;
  drawStatuses(all);
  drawEmpty(all.length, lines.length);
  const shown = `${commas(found)} ${found === 1 ? "run" : "runs"} shown`;
  const of = found < total ? ` of ${commas(total)}` : "";
  const gone = missing().length;
  const chosen = state.run.length ? `, ${state.run.length - gone} selected${gone ? `, ${gone} missing` : ""}` : "";
  say(warning || shown + of + chosen + (pending ? `, ${commas(pending)} not read yet` : ""));
  document.body.classList.toggle("has-chosen", state.run.length > 0);
}

/** Say why an action did less than asked, until the next action. */
function warn(text) {
  warning = text;
  drawList();
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
  document.querySelector(".find").hidden = !$("none").hidden; // nothing to find
  $("no-match").hidden = found > 0 || all === 0 || unread;
}

function drawReport() {
  const chosen = state.run.length > 0;
  const found = state.run.filter((id) => sources.has(id)).map((id) => sources.get(id));
  document.querySelector(".hero").hidden = !chosen;
  $("page").hidden = !chosen;
  const folder = commonFolder(state.run);
  const title = found.length === 1 ? found[0].name : folder ? `${found.length} runs of ${folder} compared` : `${found.length} records compared`;
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
  $("chosen-label").textContent = state.run.length === 1 ? "Shown" : `${state.run.length} compared`;
  $("save").hidden = missing().length === state.run.length;
  $("save").href = `report?${new URLSearchParams(state.run.map((id) => ["run", id]))}`;
  const sign = JSON.stringify(state.run.map((id) => [id, runs.has(id) && runs.get(id).name, color(id), missing().includes(id)]));
  if ($("chosen").dataset.sign === sign) return; // a new button would miss a click that has begun
  $("chosen").dataset.sign = sign;
  const names = state.run.map((id) => (runs.has(id) ? runs.get(id).name : id));
  const inside = (name) => name.slice(name.lastIndexOf("/") + 1); // without the group, unless another has a run of that name
  const items = state.run.map((id, index) => {
    const name = names[index];
    const unique = names.filter((each) => inside(each) === inside(name)).length === 1;
    const remove = node("button", { type: "button", "data-id": id, "aria-label": `Remove ${name}` }, "×");
    const away = missing().includes(id) ? node("small", {}, runs.has(id) ? "not read" : "missing") : null;
    return node("li", {}, key(id), node("span", { class: "two-parts", title: name }, ...twoParts(unique ? inside(name) : name)), away, remove);
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
  $("filter").value = "";
  filterBy({ q: "", status: "" });
  $("filter").focus();
});
document.addEventListener("paceline:theme", () => {
  list.recolor(colors());
  drawChosen();
});
$("plotly").addEventListener("load", () => window.Paceline.redraw());

useAddress();
writeAddress();
drawList();
drawReport();
connect();
