// The columns of a run's rows, also where its batch grows or workers join: phases and joins as columns of their own, and epochs of
// unequal steps.
"use strict";
(() => {
  const { commas, isNumber } = window.Paceline;

  // A column of the rows of a kind; of "phase": where the batch changes; of "join": where the number of workers does.
  function column(source, table, name) {
    if (table === "phase" || table === "join") return heldColumn(source, table === "phase" ? phasesOf(source) : joinsOf(source), name);
    const columns = (source.series || {})[table] || {};
    if (name === "epoch" && table !== "epoch" && columns.step && grows(source)) return epochsOf(source, columns.step);
    if (name === "epoch" && table !== "epoch" && columns.step && isNumber((source.facts || {}).steps_per_epoch)) {
      const each = source.facts.steps_per_epoch;
      return each > 0 ? columns.step.map((step) => (step === null ? null : step / each)) : columns.epoch;
    }
    return columns[name];
  }

  const grows = (source) => (source.phases || []).length > 0;
  const stepsOf = (source) => Math.max(0, ...["step", "epoch"].map((table) => ((source.series[table] || {}).step || []).at(-1) || 0));

  // The epochs at these steps, with a batch schedule: between the starts of phases and the ends of epochs, which are known, steps
  // have the same size.
  function epochsOf(source, steps) {
    const { step: ends = [], epoch: epochs = [] } = source.series.epoch || {}, last = source.phases.at(-1);
    const known = [...source.phases.map(({ step, epoch }) => [step, epoch]), ...ends.map((step, index) => [step, epochs[index]])]
      .filter(([step, epoch]) => isNumber(step) && isNumber(epoch)).sort((a, b) => a[0] - b[0]);
    const each = last.global_batch / (source.facts.train_samples || Infinity), [step, epoch] = known.at(-1);
    known.push([step + Math.ceil((Math.floor(epoch) + 1 - epoch) / each), Math.floor(epoch) + 1]); // the end of the epoch that is running
    let at = 0;
    return steps.map((value) => {
      if (!isNumber(value)) return null;
      while (at < known.length - 2 && value > known[at + 1][0]) at++;
      const [[from, low], [to, high]] = [known[at], known[at + 1]], share = Math.min(1, (value - from) / (to - from));
      return isNumber(share) ? low + share * (high - low) : low;
    });
  }

  const joined = (source) => (source.joins || []).length > 0;

  // The phases and the numbers of workers of a run. One without a schedule has the same batch, or workers, all the time.
  function phasesOf(source) {
    const { global_batch, virtual_workers } = source.facts || {};
    return grows(source) ? source.phases : stepsOf(source) ? [{ step: 0, epoch: 0, global_batch, virtual_workers }] : [];
  }

  function joinsOf(source) {
    if (joined(source)) return [{ step: 0, epoch: 0, workers: source.joins[0].was }, ...source.joins];
    return stepsOf(source) ? [{ step: 0, epoch: 0, workers: (source.facts || {}).workers }] : [];
  }

  // Values where they change, and at the last step.
  function heldColumn(source, rows, name) {
    if (!rows.length) return [];
    const ends = [...rows.map((row) => row.step), Math.max(stepsOf(source), rows.at(-1).step)];
    if (name === "step") return ends;
    if (name === "time_s") return ends.map((step) => timeAt(source, step));
    if (name !== "epoch") return [...rows, rows.at(-1)].map((row) => row[name]);
    const each = (source.facts || {}).steps_per_epoch;
    return grows(source) ? epochsOf(source, ends) : ends.map((step) => (each > 0 ? step / each : null));
  }

  // When a step had ended, from the rows at and before it.
  function timeAt(source, step) {
    let time = step ? null : 0;
    for (const table of ["step", "epoch"]) {
      const { step: steps = [], time_s: times = [] } = source.series[table] || {};
      const index = steps.findLastIndex((value, place) => isNumber(value) && value <= step && isNumber(times[place]));
      if (index >= 0) time = Math.max(time || 0, times[index]);
    }
    return time;
  }

  // Ticks of a log axis at the values that the lines have, as far as there is room: batches double, decades say little about them.
  function ownTicks(data) {
    const all = [...new Set(data.flatMap(({ y }) => y).filter((value) => value > 0))].sort((a, b) => b - a);
    const least = Math.log(all[0] / all.at(-1)) / 9;
    const tickvals = all.reduce((kept, value) => (kept.length && Math.log(kept.at(-1) / value) < least ? kept : [...kept, value]), []);
    return { tickmode: "array", tickvals, ticktext: tickvals.map(commas), rangemode: "normal" };
  }

  Object.assign(window.Paceline, { column, grows, joined, ownTicks });
})();
