// The columns of the list: what a cell shows, and what it is sorted by. In a group, numbers that differ are shown as a range.

const { commas, figure, isNumber, time } = window.Paceline;

const count = (value) => (isNumber(value) ? commas(value) : isRange(value) ? `${commas(value.low)}–${commas(value.high)}` : "");
const either = (a, b) => (isNumber(a) ? a : b);

/** The metric by which a run is judged: its accuracy or, without one, its loss. */
export const metricOf = (summary) => (isNumber(summary.accuracy) ? "accuracy" : isNumber(summary.loss) ? "loss" : null);

export const COLUMNS = [
  { key: "name", title: "name", first: 1 },
  { key: "status", title: "status", first: 1 },
  { key: "task", title: "task", first: 1 },
  { key: "workers", title: "workers", show: workers, first: -1, about: "workers: processes with one device each; V: virtual workers, if that number differs" },
  { key: "epochs", title: "epochs", show: epochs, first: -1, about: "epochs trained, and how many there will be" },
  { key: "best", title: "best", show: (run) => score(run.best), first: -1, about: "the best validation" },
  { key: "last", title: "last", show: (run) => score(last(run)), of: last, first: -1, about: "the last validation" },
  { key: "samples_per_s", title: "samples/s", show: (run) => count(run.samples_per_s), first: -1 },
  { key: "global_batch", title: "batch", show: (run) => count(run.global_batch), first: -1, about: "global batch: samples per step" },
  { key: "optimizer", title: "optimizer", first: 1 },
  { key: "when", title: "started", show: (run) => ago(run.when), first: -1 },
  { key: "time_s", title: "duration", show: (run) => (isNumber(run.time_s) ? time(run.time_s) : ""), first: -1, about: "time spent in training; of a group: of all its runs together" },
];

/** What a run is sorted by in a column; null if it has nothing there. */
export function valueOf(column, summary, way) {
  const value = column.of ? column.of(summary) : summary[column.key];
  if (isRange(value)) return way < 0 ? value.high : value.low;
  return value === undefined || value === "" ? null : value;
}

/** One number if all are the same, else their range; null without any. */
export function rangeOf(values) {
  const known = values.flatMap((value) => (isRange(value) ? [value.low, value.high] : value)).filter(isNumber);
  if (!known.length) return null;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  return low === high ? low : { low, high };
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

export function workers({ workers, virtual_workers: parts }) {
  const differs = parts !== null && parts !== undefined && count(parts) !== count(workers);
  return count(workers) + (differs ? ` (V ${count(parts)})` : "");
}

function epochs({ epochs, total_epochs: total }) {
  if (!isNumber(epochs)) return isNumber(total) ? `0 of ${commas(total)}` : count(epochs);
  return isNumber(total) && total > epochs ? `${commas(epochs)} of ${commas(total)}` : commas(epochs);
}

/** The last validation of a run. A group has no value for it. */
function last(summary) {
  return summary.isGroup ? null : either(summary.accuracy, summary.loss);
}

function score(value) {
  return isNumber(value) ? figure(value) : "";
}

function isRange(value) {
  return typeof value === "object" && value !== null;
}
