// The board: what is chosen, sorted and filtered (all of it in the address), and a stream of events that keeps it up to date.
// rows.js draws the list; the report of what is chosen is the page's (window.Paceline).

import { COLUMNS, makeRows } from "./rows.js";

const { colour, commas, key, node, unitOf } = window.Paceline;

const MOST = 24; // runs compared at once, as the server has it
const PATIENCE_MS = 60000; // a page nobody looks at gives its connection back: browsers have six for a server

const $ = (id) => document.getElementById(id);
const runs = new Map(); // id -> summary
const sources = new Map(); // id -> record, of those chosen
const state = { run: [], sort: { key: "when", way: -1 }, q: "", status: "", x: "" };
let pending = 0;
let since = "";
let stream = null;
let drawn = false;
let headline = "";
let told = false; // whether the list came
let lost = ""; // of those chosen, which are not here
let first = true; // whether a run may be chosen for a user who chose none

const list = makeRows($("rows"), { toggle, only, sort: sortBy });

// --- the address

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
  history.replaceState(null, "", `${location.pathname}#${said}`); // without the token, which a cookie holds by now
}

// --- what the user does

function toggle(id) {
  const chosen = state.run.includes(id);
  if (!chosen && state.run.length >= MOST) {
    say(`${MOST} runs are compared at most: take one out first`);
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
  stream.addEventListener("open", () => tellLink("live", "live"));
  stream.addEventListener("error", () => {
    tellLink("lost", "no connection: is the board still running? It may have a new address");
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  });
  stream.addEventListener("runs", (event) => takeRuns(event.lastEventId, JSON.parse(event.data)));
  stream.addEventListener("source", (event) => takeSource(JSON.parse(event.data)));
  stream.addEventListener("rows", (event) => takeRows(JSON.parse(event.data)));
}

function takeRuns(id, change) {
  since = id;
  told = true;
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

/** Those chosen of which nothing will come: the list has none of that name, or says why it is not read. */
function missing() {
  if (!told || pending) return [];
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

/** Put rows, as columns, below those that are there; steps that are there already are not there twice. */
function append(table, columns) {
  const steps = columns.step || [];
  const last = table.step && table.step.length ? table.step[table.step.length - 1] : -Infinity;
  const kept = steps.map((step, index) => (step > last ? index : -1)).filter((index) => index >= 0);
  const before = Math.max(0, ...Object.values(table).map((column) => column.length));
  for (const name of new Set([...Object.keys(table), ...Object.keys(columns)])) {
    const column = table[name] || (table[name] = new Array(before).fill(null));
    for (const index of kept) column.push(columns[name] ? columns[name][index] : null);
  }
}

function tellLink(kind, text) {
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

/** Draw with the next frame, once, however many events ask for it. */
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
    if (!hasX || !hasY) return hasY - hasX || names.compare(a.name, b.name); // those that say nothing come last, either way
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
  list.show(found, colours(), state.sort, unitOf(all.filter((summary) => summary.unit)));
  $("order").value = state.sort.key;
  drawStatuses(all);
  drawEmpty(all.length, found.length);
  const shown = `${commas(found.length)} ${found.length === 1 ? "run" : "runs"} shown`;
  const of = found.length < all.length ? ` of ${commas(all.length)}` : "";
  const gone = missing().length;
  const chosen = state.run.length ? `, ${state.run.length - gone} chosen${gone ? `, ${gone} not here` : ""}` : "";
  say(shown + of + chosen + (pending ? `, ${commas(pending)} still to be read` : ""));
  document.body.classList.toggle("has-chosen", state.run.length > 0);
}

function say(text) {
  if ($("count").textContent !== text) $("count").textContent = text;
}

function drawStatuses(all) {
  const counts = new Map();
  for (const summary of all) counts.set(summary.status, (counts.get(summary.status) || 0) + 1);
  if (state.status && !counts.has(state.status)) counts.set(state.status, 0);
  const options = [["", "every status"], ...[...counts].sort().map(([status, count]) => [status, `${status} (${commas(count)})`])];
  const now = JSON.stringify(options);
  if ($("status").dataset.options !== now) {
    $("status").dataset.options = now;
    $("status").replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  }
  $("status").value = state.status;
}

function drawEmpty(all, found) {
  const unread = !told || pending > 0;
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
  $("title").textContent = found.length ? title : none ? runs.get(gone[0])?.name || "Not here" : chosen ? "Reading" : "";
  document.title = found.length ? `${title} · Paceline board` : "Paceline board";
  if (!found.length) headline = none ? reasons(gone) : "";
  if (drawn) window.Paceline.update(found, { headline });
  else if (found.length) {
    drawn = true;
    window.Paceline.render($("page"), found, { headline, chartsFirst: true });
    useAxis();
  } else window.Paceline.headline(headline);
  drawChosen(); // in the colours that the page has given
  if (String(gone) === lost) list.recolour(colours());
  else drawList(); // which says how many are chosen
  lost = String(gone);
}

/** Why nothing of these is shown. */
function reasons(ids) {
  const notes = ids.filter((id) => runs.has(id)).map((id) => (ids.length > 1 ? `${runs.get(id).name}: ` : "") + runs.get(id).note);
  return notes.join("; ") || "What the address names is not in this folder, or not any more.";
}

function drawChosen() {
  $("chosen").hidden = state.run.length === 0;
  $("chosen-label").textContent = state.run.length === 1 ? "Shown" : "Compared";
  $("save").hidden = missing().length === state.run.length;
  $("save").href = `report?${new URLSearchParams(state.run.map((id) => ["run", id]))}`;
  const sign = JSON.stringify(state.run.map((id) => [id, runs.has(id) && runs.get(id).name, colour(id), missing().includes(id)]));
  if ($("chosen").dataset.sign === sign) return; // made anew, a button would miss the click that is under way
  $("chosen").dataset.sign = sign;
  const items = state.run.map((id) => {
    const name = runs.has(id) ? runs.get(id).name : id;
    const remove = node("button", { type: "button", "data-id": id, "aria-label": `Take out ${name}` }, "×");
    const away = missing().includes(id) ? node("small", {}, runs.has(id) ? "not read" : "not here") : null;
    return node("li", {}, key(id), node("span", { title: name }, name), away, remove);
  });
  const focused = document.activeElement && document.activeElement.closest("#chosen li") ? document.activeElement.dataset.id : null;
  document.querySelector("#chosen ul").replaceChildren(...items);
  if (focused === null) return;
  const again = [...document.querySelectorAll("#chosen li button")].find((button) => button.dataset.id === focused);
  (again || document.querySelector("#chosen li button") || $("filter")).focus();
}

/** The colours of the chosen ones; of those that are not read yet, a line's. */
function colours() {
  return new Map(state.run.map((id) => [id, colour(id) || "var(--line)"]));
}

// --- the x axis: the page has the buttons, the address remembers which

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

// Links within the page go where they say, but leave the address, which is the board's.
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
  list.recolour(colours());
  drawChosen();
});
$("plotly").addEventListener("load", () => window.Paceline.redraw());

readAddress();
writeAddress();
drawList();
drawReport();
connect();
