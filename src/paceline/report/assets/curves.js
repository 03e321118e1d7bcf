// Curves of training runs, by step and by epoch, and the toolbar that selects what they show. To add a curve: chartsOf().
"use strict";
(() => {
  const {
    state, trains, theme, lineStyle, colorPlace, safe, uid, clip, isNumber, seconds, plain, unitOf, node, key, twoParts, chart, allTool,
    context, layout, rangeOf, robustRange, typical, column, grows, joined, ownTicks,
  } = window.Paceline;

  // The dash of a run's epoch lines next to its step lines: runs of the same color have different ones.
  const DOTTED = { solid: "dot", dash: "dash", dot: "dashdot", dashdot: "longdashdot" };
  const X_WORDS = { step: "step", epoch: "epoch", time_s: "time" };

  // The index of a metric's best validation; -1 for metrics of which nobody knows whether more is better.
  const UP = /(^|[_/])(accuracy|acc|f1|auc|precision|recall|score|bleu|iou|dice)(_|$)/;
  const DOWN = /(^|[_/])(loss|error|perplexity|mae|mse|rmse)(_|$)/;

  function bestIndex(name, ys) {
    const sign = UP.test(name) ? 1 : DOWN.test(name) ? -1 : 0;
    if (!sign || !has(ys)) return -1;
    return ys.reduce((best, y, index) => (isNumber(y) && (best < 0 || sign * y > sign * ys[best]) ? index : best), -1);
  }

  // A run's best validation of a metric: {value, epoch}; null without one.
  function bestOf(source, name) {
    const ys = column(source, "epoch", `val_${name}`), index = bestIndex(name, ys);
    return index < 0 ? null : { value: ys[index], epoch: (column(source, "epoch", "epoch") || [])[index] };
  }

  // An average of the rows before and after each row, weighted by weight^distance: unlike a one-sided average it does not lag.
  function smooth(ys, weight) {
    const sums = ys.map(() => [0, 0]);
    for (const indices of [ys.keys(), [...ys.keys()].reverse()]) {
      let sum = 0, whole = 0;
      for (const index of indices) {
        sums[index][0] += sum;
        sums[index][1] += whole;
        if (isNumber(ys[index])) [sum, whole] = [sum + ys[index], whole + 1];
        [sum, whole] = [weight * sum, weight * whole];
      }
    }
    return ys.map((y, index) => (isNumber(y) ? (y + sums[index][0]) / (1 + sums[index][1]) : null));
  }

  const isByEpoch = ({ facts }) => String((facts || {}).schedule).includes("by epoch");
  const isSmoothed = (table, name) => state.smooth > 0 && !["epoch", "phase", "join"].includes(table) && name !== "lr";

  const isLate = (source) => (column(source, "health", "lag_s") || []).some((value) => value > 0); // a single worker has no lag

  // The learning rate, with a gap where an extended run took up the schedule of its new length: the rate jumps there.
  function rates(source, x) {
    const steps = column(source, "step", "step") || [], at = (source.facts || {}).extended ? source.facts.resumed_at : null;
    const place = isNumber(at) ? steps.findIndex((step) => step > at) : -1;
    const cut = (values) => (place > 0 && values ? [...values.slice(0, place), null, ...values.slice(place)] : values);
    return [cut(column(source, "step", x)), cut(column(source, "step", "lr"))];
  }

  const has = (values) => Array.isArray(values) && values.some(isNumber);

  // All charts that the sources have data for: [{key, title, note, lines: [[table, column, "training" | "validation" | ""]]}].
  function chartsOf(sources) {
    const names = new Set();
    const skip = new Set(["step", "epoch", "time_s", "lr", "noise_scale", "loss", "gain", "samples_per_s", "epoch_time_s", "global_batch"]);
    for (const source of sources) {
      for (const name of Object.keys(source.series.step || {})) if (!skip.has(name)) names.add(name);
      for (const name of Object.keys(source.series.epoch || {})) {
        if (name.startsWith("val_") && name !== "val_loss") names.add(name.slice(4));
      }
    }
    const both = (name) => [["step", name, "training"], ["epoch", `val_${name}`, "validation"]];
    const unit = `${unitOf(sources)}/s`;
    const all = [
      { key: "loss", title: "Loss", lines: both("loss"), log: true },
      ...[...names].sort((a, b) => (b === "accuracy") - (a === "accuracy") || (a < b ? -1 : 1))
        .map((name) => ({ key: `m-${name}`, title: words(name), lines: both(name) })),
      { key: "lr", title: "Learning rate", lines: [["step", "lr", ""]] },
      ...(sources.some(grows) ? [{ key: "batch", title: "Global batch", log: true, held: true, lines: [["phase", "global_batch", ""]] }] : []),
      ...(sources.some(joined) ? [
        {
          key: "parts", title: "Parts and workers", log: true, held: true,
          lines: [["phase", "virtual_workers", "parts"], ["join", "workers", "workers"]],
        },
      ] : sources.some(grows) ? [{ key: "parts", title: "Parts", log: true, held: true, lines: [["phase", "virtual_workers", ""]] }] : []),
      {
        key: "speed", title: unit[0].toUpperCase() + unit.slice(1),
        lines: [["health", "samples_per_s", "while training"], ["epoch", "samples_per_s", "whole epochs"]], zero: true,
      },
      {
        key: "noise", title: "Noise scale", note: "the global batch beyond which more workers help less",
        lines: [["step", "noise_scale", ""]],
      },
      { key: "gain", title: "AdaScale's gain", lines: [["step", "gain", ""]] },
      { key: "lag", title: "Slowest worker's lag", unit: "ms", by: 1e3, lines: [["health", "lag_s", ""]], zero: true },
    ];
    const drawn = ([table, name]) => sources.some((source) => has(column(source, table, name)));
    return all
      .map((chart) => ({ ...chart, lines: chart.lines.filter(drawn) }))
      .filter((chart) => chart.lines.length && (chart.key !== "lag" || sources.some(isLate)));
  }

  const words = (name) => (name.charAt(0).toUpperCase() + name.slice(1)).replace(/_/g, " ");

  // The x axis: its title, and what seconds are divided by.
  function xAxis(sources, x) {
    if (x !== "time_s") return { title: X_WORDS[x], by: 1 };
    let most = 0;
    for (const source of sources) {
      for (const table of ["step", "epoch"]) {
        for (const value of column(source, table, "time_s") || []) if (value > most) most = value;
      }
    }
    if (most > 4 * 3600) return { title: "time (h)", by: 3600 };
    return most > 300 ? { title: "time (min)", by: 60 } : { title: "time (s)", by: 1 };
  }

  const FAR = { well: 25, failed: 3 }; // a failed run may make the axis 3 times as long, the others are left out in extreme cases
  const didWell = (source) => source.tone !== "bad";

  // The part of the y axis to show, in the axis's own units, if some runs leave what the others need; null if all fit.
  function nearRange(chart, sources, log) {
    const scaled = (value) => (!isNumber(value) || (log && value <= 0) ? null : log ? Math.log10(value) : value * (chart.by || 1));
    const zero = chart.zero && !log; // such an axis begins at 0, so what counts is how far a run's values are from there
    const groups = sources.map((source) => {
      const range = rangeOf(chart.lines.flatMap(([table, name]) => (column(source, table, name) || []).map(scaled)));
      return range && { ...range, ...(zero ? { low: 0 } : {}), well: didWell(source) };
    }).filter(Boolean);
    const range = groups.length > 1 ? robustRange(groups, typical(groups), FAR) : null;
    return range && zero ? { ...range, low: 0 } : range;
  }

  // Marks at the edge of the axis, where a line leaves it.
  function edgeMarks(line, range, log, unit) {
    const found = { up: [], down: [] };
    const scaled = (y) => (log ? Math.log10(y) : y);
    let before = "";
    line.y.forEach((y, index) => {
      if (!isNumber(y) || (log && y <= 0)) return;
      const now = scaled(y) > range.high ? "up" : scaled(y) < range.low ? "down" : "";
      if (now && now !== before && found[now].length < 20) found[now].push(index);
      before = now;
    });
    return Object.entries(found).filter(([, indices]) => indices.length).map(([way, indices]) => {
      const edge = way === "up" ? range.high : range.low;
      return {
        type: "scatter", mode: "markers", name: line.name, uid: `${line.uid}-${way}`, x: indices.map((index) => line.x[index]),
        y: indices.map(() => (log ? 10 ** edge : edge)), customdata: indices.map((index) => plain(line.y[index])),
        cliponaxis: false,
        marker: { size: 11, symbol: `triangle-${way}`, color: line.line.color },
        hovertemplate: `${line.name}: %{customdata}${unit}, outside the axis<extra></extra>`,
      };
    });
  }

  function isWide(chart, sources) {
    let low = Infinity, high = 0;
    const well = sources.filter(didWell);
    for (const source of well.length ? well : sources) {
      for (const [table, name] of chart.lines) {
        for (const value of column(source, table, name) || []) {
          if (value > 0) { low = Math.min(low, value); high = Math.max(high, value); }
        }
      }
    }
    return high / low > 100;
  }

  // An axis for lines with a single constant value, which plotly would draw between -1 and 1; nothing for other lines.
  function flatAxis(data) {
    let low = Infinity, high = -Infinity;
    for (const { y } of data) {
      for (const value of y) if (isNumber(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    }
    const size = Math.max(Math.abs(low), Math.abs(high));
    if (!(high - low <= 1e-9 * size) || !size || !isNumber(size)) return {};
    return { range: high > 0 ? [0, 2 * size] : [-2 * size, 0], tick0: 0, dtick: size / 2 };
  }

  function curveFigure(chart, sources, context) {
    const { look, x, range } = context;
    const axis = xAxis(sources, x), shown = sources.filter((source) => !context.hidden.has(source.id)), data = [], marks = [];
    const short = Math.max(10, Math.floor(look.width / 32)); // a tooltip fits beside the pointer
    const two = chart.lines.length > 1, unit = chart.unit ? ` ${chart.unit}` : "";
    for (const source of shown) {
      const style = lineStyle(context.color(source.id), look.theme);
      for (const [table, name, what] of chart.lines) {
        const [xs, ys] = name === "lr" ? rates(source, x) : [column(source, table, x), column(source, table, name)];
        if (!has(ys) || !has(xs) || (chart.key === "lag" && !isLate(source))) continue;
        const points = table === "epoch" || (!chart.held && ys.filter(isNumber).length < 3);
        const dotted = two && (table === "epoch" || table === "join");
        const size = ys.length > 100 ? 3 : ys.length > 30 ? 5 : 7; // many dots would hide their own line
        const best = table === "epoch" && name.startsWith("val_") ? bestIndex(name.slice(4), ys) : -1;
        const label = [
          sources.length > 1 ? clip(source.name, short) : "", two || sources.length === 1 ? what || chart.title : "",
        ].filter(Boolean).join(", ");
        const line = {
          type: "scatter", mode: points ? "lines+markers" : "lines", name: safe(label),
          uid: uid(`run${context.color(source.id)}`, table, name),
          x: axis.by === 1 ? xs : xs.map((value) => (value === null ? null : value / axis.by)),
          y: chart.by ? ys.map((value) => (value === null ? null : value * chart.by)) : ys,
          line: {
            color: style.color, dash: dotted ? DOTTED[style.dash] : style.dash, width: dotted ? 1.4 : 1.8,
            // A rate holds up to its row, a batch or a number of workers from its row on.
            shape: chart.held ? "hv" : name === "lr" && isByEpoch(source) ? "vh" : "linear",
          },
          marker: {
            size: best < 0 ? size : ys.map((_, index) => (index === best ? 14 : size)), color: style.color,
            symbol: best < 0 ? "circle" : ys.map((_, index) => (index === best ? "star" : "circle")), opacity: 1,
            line: { width: 0 }, // plotly outlines points of different sizes, and the outlines would hide small ones
          },
          customdata: best < 0 ? undefined : ys.map((_, index) => (index === best ? " (best)" : "")),
          hovertemplate: `${safe(label)}: %{y:,.5~g}${unit}${best < 0 ? "" : "%{customdata}"}<extra></extra>`,
        };
        if (isSmoothed(table, name) && !points) {
          const faint = { opacity: 0.28, line: { ...line.line, width: 1.2 }, hoverinfo: "skip", hovertemplate: null };
          data.push({ ...line, ...faint, uid: `${line.uid}-raw` });
          line.customdata = line.y.map((y) => plain(y));
          line.y = smooth(line.y, state.smooth);
          line.hovertemplate = `${safe(label)}: %{y:,.4~g} (raw %{customdata})<extra></extra>`;
        }
        data.push(line);
        if (range) marks.push(...edgeMarks(line, range, context.log, unit));
      }
    }
    const ticks = x === "time_s" ? "" : ",.10~g";
    const lines = data.filter((line) => line.hoverinfo !== "skip").length;
    return {
      data: [...data, ...marks],
      layout: layout(look, {
        hovermode: lines <= 12 ? "x unified" : "closest", uirevision: `${chart.key} ${x} ${context.log} ${Boolean(range)}`,
        xaxis: {
          title: { text: axis.title }, tickformat: ticks, hoverformat: ",.5~g", rangemode: "tozero",
          unifiedhovertitle: { text: `${axis.title} %{x:,.4~r}` }, nticks: look.narrow ? 5 : 9,
        },
        yaxis: {
          type: context.log ? "log" : "linear", rangemode: chart.zero && !context.log ? "tozero" : "normal",
          title: { text: chart.unit || "" }, tickformat: context.log ? "~g" : ",.6~g", nticks: 7,
          ...(range ? { range: [range.low, range.high] } : context.log ? (chart.held ? ownTicks(data) : {}) : flatAxis(data)),
        },
      }),
    };
  }

  function curveTable(chart, sources, context) {
    const rows = [];
    for (const source of sources) {
      if (context.hidden.has(source.id)) continue;
      for (const [table, name, what] of chart.lines) {
        const ys = column(source, table, name) || [], indices = ys.map((_, index) => index).filter((index) => isNumber(ys[index]));
        const every = Math.max(1, Math.ceil(indices.length / 60));
        indices.filter((_, place) => place % every === 0 || place === indices.length - 1).forEach((index) => {
          const at = (axis) => (column(source, table, axis) || [])[index];
          rows.push([
            source.name, what || chart.title, plain(at("step")), plain(at("epoch")),
            isNumber(at("time_s")) ? seconds(at("time_s")) : "–", plain(chart.by ? ys[index] * chart.by : ys[index]),
          ]);
        });
      }
    }
    return {
      head: ["run", "what", "step", "epoch", "time", chart.unit ? `${chart.title} (${chart.unit})` : chart.title], rows, numbers: 2,
    };
  }

  function curveLabel(chart, sources, context) {
    const said = [];
    for (const source of sources) {
      if (context.hidden.has(source.id)) continue;
      const line = chart.lines.find(([table, name]) => has(column(source, table, name)));
      if (!line) continue;
      const ys = column(source, line[0], line[1]).filter(isNumber), by = chart.by || 1;
      said.push(`${source.name}: from ${plain(ys[0] * by)} to ${plain(ys[ys.length - 1] * by)}`);
    }
    return `Chart: ${chart.title} by ${X_WORDS[context.x]}. ${said.slice(0, 6).join("; ")}.`;
  }

  // The weight of the next row relative to a row itself: averages of about 3, 9 and 39 rows.
  const SMOOTHING = [[0, "off"], [0.5, "light"], [0.8, "medium"], [0.95, "strong"]];

  // One of several values of `state`, as a row of buttons.
  function choice(name, label, about, values, more = () => ({})) {
    return {
      key: name, sign: state[name],
      make: () => node(
        "div", { role: "group", "aria-label": about }, node("span", { class: "label" }, label),
        node(
          "span", { class: "switch" },
          ...values.map(([value, word]) => node(
            "button",
            {
              type: "button", "aria-pressed": String(state[name] === value), "data-focus": `${name} ${value}`, ...more(value),
              onclick: () => { state[name] = value; window.Paceline.redraw(); },
            },
            word,
          )),
        ),
      ),
    };
  }

  function toolbar(sources) {
    const runs = trains(sources);
    if (!chartsOf(runs).length) return [];
    const axes = [["step", "steps"], ["epoch", "epochs"], ["time_s", "time"]];
    const items = [
      choice("x", "X axis", "X axis of the charts", axes, (x) => ({ "data-x": x })),
      choice("smooth", "Smoothing", "Smoothing of the curves", SMOOTHING),
    ];
    if (runs.length > 1) {
      items.push({
        key: "runs", sign: [runs.map((run) => [run.id, run.name, state.hidden.has(run.id), colorPlace(run.id)]), theme()],
        make: () => node(
          "div", { class: "chips", role: "group", "aria-label": "Runs shown" },
          ...runs.map((run) => node(
            "button",
            {
              type: "button", class: "chip", "aria-pressed": String(!state.hidden.has(run.id)), "data-focus": `run ${run.id}`,
              title: run.name,
              onclick: () => {
                state.hidden.has(run.id) ? state.hidden.delete(run.id) : state.hidden.add(run.id);
                window.Paceline.redraw();
              },
            },
            key(run.id), node("span", { class: "two-parts" }, ...twoParts(run.name)),
          )),
        ),
      });
    }
    return items;
  }

  function hintOf(each, log, range) {
    const seen = each.lines.map((line) => line[2]).filter(Boolean);
    const starred = each.lines.some(([, name]) => name.startsWith("val_") && bestIndex(name.slice(4), [1]) === 0);
    return [
      seen.length > 1
        ? `line: ${seen[0]}; ${each.held ? "dotted" : "dots"}: ${seen[1]}` : seen[0] === "validation" || seen[0] === "training" ? seen[0] : each.note || "",
      starred ? "star: best" : "", log ? "log scale" : "", range ? "arrows: outside the axis" : "",
    ].filter(Boolean).join("; ");
  }

  const logTool = (key, log) => ({
    sign: log,
    make: () => node(
      "button",
      {
        type: "button", class: "button", "aria-pressed": String(Boolean(log)), "data-focus": `${key} log`,
        onclick: () => { state.log.set(key, !log); window.Paceline.redraw(); },
      },
      log ? "Linear scale" : "Log scale",
    ),
  });

  function curves(sources) {
    const runs = trains(sources);
    return chartsOf(runs).map((each) => {
      const wide = each.log && (each.held || isWide(each, runs)), log = state.log.has(each.key) ? state.log.get(each.key) : wide;
      const shown = runs.filter((source) => !state.hidden.has(source.id));
      const near = each.held ? null : nearRange(each, shown, log), range = state.all.has(each.key) ? null : near;
      const tools = [...(near ? [allTool(each.key)] : []), ...(each.log ? [logTool(each.key, log)] : [])];
      const own = (plot) => ({ ...plot, log, range });
      return chart({
        key: each.key, title: each.title + (each.unit ? ` (${each.unit})` : ""), hint: hintOf(each, log, range), tools,
        figure: (plot) => curveFigure(each, runs, own(plot)), label: () => curveLabel(each, runs, context()),
        rows: () => curveTable(each, runs, context()),
      });
    });
  }

  window.Paceline.sections.tools = { title: "", make: toolbar };
  // `quiet`: below the toolbar, a visible head would only take space.
  window.Paceline.sections.curves = { title: "Curves", quiet: true, grid: true, make: curves };
  Object.assign(window.Paceline, { xAxis, bestOf });
})();
