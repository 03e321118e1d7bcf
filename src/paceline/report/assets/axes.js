// Which part of an axis to show when some values are far from all others: one diverged run must not flatten the other lines.
"use strict";
(() => {
  const { isNumber } = window.Paceline;

  // The range of some values; null if none is a number.
  function rangeOf(values) {
    let low = Infinity, high = -Infinity;
    for (const value of values) if (isNumber(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    return low <= high ? { low, high } : null;
  }

  const join = (a, b) => ({ low: Math.min(a.low, b.low), high: Math.max(a.high, b.high) });
  const span = (range) => range.high - range.low;

  // groups: [{low, high, well}], `first` the one that must be shown. Adds the groups that did well, then those that failed, the
  // nearest first, up to one that would make the axis more than `far` times as long; `least` is the shortest length that counts.
  // Returns the range with a margin, or null if it holds all groups.
  function robustRange(groups, first, far, least = 0) {
    let kept = first, out = 0;
    for (const well of [true, false]) {
      const left = groups.filter((group) => group !== first && Boolean(group.well) === well);
      while (left.length) {
        const longer = left.map((group) => span(join(kept, group))), next = Math.min(...longer);
        if (next > far[well ? "well" : "failed"] * Math.max(span(kept), least, 1e-9 * Math.abs(kept.high))) break;
        kept = join(kept, left.splice(longer.indexOf(next), 1)[0]);
      }
      out += left.length;
    }
    if (!out) return null;
    const margin = 0.06 * Math.max(span(kept), least) || 0.06 * Math.abs(kept.high) || 1;
    return { low: kept.low - margin, high: kept.high + margin };
  }

  // The group that the others are compared with: the one of typical length among those that did well.
  function typical(groups) {
    const well = groups.filter((group) => group.well), from = (well.length ? well : groups).filter((group) => span(group) > 0);
    const sorted = [...(from.length ? from : groups)].sort((a, b) => span(a) - span(b));
    return sorted[(sorted.length - 1) >> 1];
  }

  Object.assign(window.Paceline, { rangeOf, robustRange, typical });
})();
