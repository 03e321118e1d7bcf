// From records to the lines of the list: sorted, filtered, and the runs of a study or of a folder under one line that folds.

import { COLUMNS, metricOf, rangeOf, valueOf } from "./columns.js";

const { commas, isNumber } = window.Paceline;
const names = new Intl.Collator("en", { numeric: true });
const BAD = new Set(["failed", "diverged"]);
const PLACES = ["done", "target reached", "stopped early", "diverged", "failed", "running", "to do"]; // others come before "running"

/**
 * The lines to show, in order. Each has `id`, `summary`, `name`, `level` (1 inside a group), `second` (the text below the name) and,
 * if it is a group, `open` and `members` (the ids of its runs). `isOpen(id, otherwise)` says whether the user opened a group.
 */
export function makeLines(summaries, { q, status, sort, isOpen }) {
  const words = q.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (summary) => matchesAll(summary, words, status);
  const filtered = words.length > 0 || status !== "";
  const { groups, alone } = split(summaries);
  const order = compareBy(sort, summaries);
  const tops = alone.filter(matches).map((summary) => ({ summary, runs: null }));
  let found = tops.length;
  let runs = alone.length;
  const only = groups.size === 1 && !alone.length; // a list of one folded line would say nothing
  for (const [id, { own, members }] of groups) {
    const summary = summarize(id, own, members);
    const inside = members.filter(matches);
    const itself = matches(summary);
    runs += members.length;
    if (!itself && !inside.length) continue;
    const shown = inside.length ? inside : members;
    found += shown.length;
    tops.push({ summary, runs: shown.sort(order), open: isOpen(id, only || (filtered && !itself)) });
  }
  tops.sort((a, b) => order(a.summary, b.summary));
  const lines = [];
  for (const { summary, runs: members, open } of tops) {
    if (!members) {
      lines.push({ id: summary.id, summary, name: summary.name, level: 0, second: describe(summary) });
      continue;
    }
    const ids = members.map((member) => member.id);
    lines.push({ id: summary.id, summary, name: summary.name, level: 0, second: summary.second, open, members: ids });
    if (!open) continue;
    for (const member of members) {
      const name = summary.id === "." ? member.name : member.name.slice(summary.id.length + 1);
      lines.push({ id: member.id, summary: member, name, level: 1, second: describe(member) });
    }
  }
  return { lines, found, runs, hasGroups: groups.size > 0 };
}

/** The record that a visitor most likely wants: one that is training, or else the newest. A study stands for its runs. */
export function findNewest(summaries) {
  const all = [...summaries].sort(compareBy({ key: "when", way: -1 }, []));
  const { id } = all.find((summary) => summary.status === "running") || all[0];
  for (const [group, { own, members }] of split(all).groups) if (own && members.some((run) => run.id === id)) return group;
  return id;
}

/** The folder that all these records are in; "" if they are not in one. */
export function commonFolder(ids) {
  const folders = new Set(ids.map((id) => id.slice(0, Math.max(0, id.lastIndexOf("/")))));
  return folders.size === 1 ? [...folders][0] : "";
}

/** The metric of all runs; null if some have another. */
export function commonMetric(summaries) {
  const found = new Set(summaries.map(metricOf).filter(Boolean));
  return found.size === 1 ? [...found][0] : null;
}

/** The records by group, and those without one. */
function split(summaries) {
  const root = summaries.find((summary) => summary.id === ".");
  const groups = new Map();
  for (const summary of summaries) {
    const id = groupOf(summary.id, root);
    if (id === null) continue;
    if (!groups.has(id)) groups.set(id, { own: null, members: [] });
    groups.get(id).members.push(summary);
  }
  const alone = [];
  for (const summary of summaries) {
    const group = groups.get(summary.id);
    if (group) group.own = summary;
    else if (groupOf(summary.id, root) === null) alone.push(summary);
  }
  return { groups, alone };
}

/** The group of a record: the folder it is in, or a study that is the board's own folder. Null if it has none. */
function groupOf(id, root) {
  if (id.includes("/")) return id.slice(0, id.lastIndexOf("/"));
  return id !== "." && root && root.kind === "study" ? "." : null;
}

/** One summary for a group: its own record's, if it has one, and what its runs came to. */
function summarize(id, own, members) {
  const metric = members.some((run) => metricOf(run) === "accuracy") ? "accuracy" : "loss";
  const scored = members.filter((run) => metricOf(run) === metric && isNumber(run.best)).map((run) => run.best);
  const best = scored.length ? (metric === "accuracy" ? Math.max : Math.min)(...scored) : null;
  const range = (name) => rangeOf(members.map((run) => run[name]));
  const isRunning = members.some((run) => run.status === "running"); // a study's own files may be older than its runs'
  const { status, tone } = own && !isRunning ? own : worst(members);
  const times = members.map((run) => run.time_s).filter(isNumber);
  const whens = members.map((run) => run.when).filter(Boolean).sort();
  const group = {
    id, status, tone, isGroup: true,
    ...{ steps: members.filter((run) => run.status !== "running").length, total_steps: (own && own.planned) || members.length },
    name: own ? own.name : id,
    kind: own ? own.kind : "folder",
    task: common(members, "task") || (own && own.task) || null,
    optimizer: common(members, "optimizer"),
    [metric]: best, best,
    when: whens.length ? whens[whens.length - 1] : own && own.when,
    time_s: times.length ? times.reduce((sum, each) => sum + each, 0) : null,
    note: own && own.note, why: own && own.why,
  };
  for (const name of ["workers", "virtual_workers", "epochs", "samples_per_s", "global_batch"]) group[name] = range(name);
  group.second = [group.kind, countStatuses(own, members), own && (own.note || own.why || own.detail)].filter(Boolean).join(" · ");
  return group;
}

/** `6 runs: 4 done, 1 failed, 1 to do`. */
function countStatuses(own, members) {
  const counts = new Map();
  for (const { status } of members) counts.set(status, (counts.get(status) || 0) + 1);
  const lost = members.filter((run) => BAD.has(run.status) || run.status === "refused").length;
  const gone = own && isNumber(own.failed) ? Math.max(0, own.failed - lost) : 0; // failed before they had a record
  if (gone) counts.set("failed", (counts.get("failed") || 0) + gone);
  const all = Math.max(members.length + gone, (own && own.planned) || 0);
  const left = all - members.length - gone;
  if (left > 0) counts.set("to do", left);
  const runs = `${commas(all)} ${all === 1 ? "run" : "runs"}`;
  if (counts.size === 1) return `${runs} ${counts.keys().next().value}`;
  const place = (status) => (PLACES.includes(status) ? PLACES.indexOf(status) : PLACES.length - 2.5);
  const ordered = [...counts].sort(([a], [b]) => place(a) - place(b));
  return `${runs}: ${ordered.map(([status, count]) => `${commas(count)} ${status}`).join(", ")}`;
}

/** How a folder of runs stands: running if one is, else the status that needs the most attention. */
function worst(members) {
  const rank = (run) => (run.status === "running" ? 3 : BAD.has(run.status) ? 2 : run.tone === "good" ? 0 : 1);
  const { status, tone } = members.reduce((a, b) => (rank(b) > rank(a) ? b : a));
  return { status, tone };
}

function common(members, name) {
  const all = new Set(members.map((run) => run[name]).filter(Boolean));
  return all.size === 1 ? [...all][0] : null;
}

/** The text below a name: what a measurement found, or why a run did not finish. */
function describe({ kind, detail, note, why }) {
  const said = note || why || detail || "";
  return said && (kind === "scale" || kind === "study") ? `${kind} · ${said}` : said;
}

function matchesAll(summary, words, status) {
  if (status && summary.status !== status) return false;
  if (!words.length) return true;
  const { name, task, model, optimizer, kind } = summary;
  const text = [name, task, model, optimizer, summary.status, kind].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

/** The order of a column. Runs without a value there come last in both directions. */
function compareBy({ key, way }, summaries) {
  const column = COLUMNS.find((each) => each.key === key);
  const isMetric = key === "best" || key === "last";
  const mixed = isMetric && new Set(summaries.map(metricOf).filter(Boolean)).size > 1;
  return (a, b) => {
    const [x, y] = [valueOf(column, a, way), valueOf(column, b, way)];
    const tie = () => names.compare(a.name, b.name);
    if (x === null || y === null) return (y !== null) - (x !== null) || tie();
    if (mixed && metricOf(a) !== metricOf(b)) return metricOf(a) === "accuracy" ? -1 : 1;
    const order = isNumber(x) && isNumber(y) ? x - y : names.compare(String(x), String(y));
    return (mixed && metricOf(a) === "loss" ? -way : way) * order || tie();
  };
}
