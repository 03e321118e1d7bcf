// Learning curves: error against data size, the fit with its band, and how well the small sizes predicted the large ones.
"use strict";
(() => {
  const { lineStyle, safe, isNumber, commas, plain, figure, node, table, chart, layout, rangeOf } = window.Paceline;

  const count = (n) => (n >= 1e6 ? `${+(n / 1e6).toPrecision(3)}M` : n >= 1e4 ? `${+(n / 1e3).toPrecision(3)}k` : commas(n));

  // A curve up to some size and from there on. Both have the row at the cut, so that the line has no gap.
  function cut(curve, at) {
    const place = curve.findIndex(([samples]) => samples >= at);
    return place < 0 ? [curve, []] : [curve.slice(0, place + 1), curve.slice(place)];
  }

  const span = (low, high) => (isNumber(low) && isNumber(high) ? ` [${figure(low)} to ${figure(high)}]` : "");

  const line = (rows, name, style, hover) => ({
    type: "scatter", mode: "lines", uid: name, x: rows.map(([samples]) => samples), y: rows.map(([, error]) => error),
    line: { width: 2, ...style }, customdata: rows.map(([samples, , low, high]) => [commas(Math.round(samples)), span(low, high)]),
    hovertemplate: `${safe(hover)}, %{customdata[0]} samples: %{y:.4f}%{customdata[1]}<extra></extra>`,
  });

  function band(rows, name, color) {
    const known = rows.filter(([, , low, high]) => low > 0 && high > 0);
    const there = known.map(([samples, , , high]) => [samples, high]), back = known.map(([samples, , low]) => [samples, low]).reverse();
    return {
      type: "scatter", mode: "lines", uid: name, x: [...there, ...back].map(([x]) => x), y: [...there, ...back].map(([, y]) => y),
      fill: "toself", fillcolor: color, line: { width: 0 }, hoverinfo: "skip",
    };
  }

  function points(found, kept, look) {
    const ink = kept ? lineStyle(0, look.theme).color : look.soft, means = found.sizes.filter((size) => size.mean > 0 && !size.dropped === kept);
    const seeds = means.flatMap((size) => size.errors.map((error) => [size.samples, error])).filter(([, error]) => error > 0);
    return [
      {
        type: "scatter", mode: "markers", uid: `seeds${kept}`, x: seeds.map(([samples]) => samples), y: seeds.map(([, error]) => error),
        marker: { size: 6, color: look.card, line: { width: 1.4, color: ink } },
        hovertemplate: "one seed, %{x:,} samples: %{y:.4f}<extra></extra>",
      },
      {
        type: "scatter", mode: "markers", uid: `means${kept}`, x: means.map((size) => size.samples), y: means.map((size) => size.mean),
        marker: { size: 9, color: ink, symbol: kept ? "circle" : "x" },
        hovertemplate: `mean${kept ? "" : ", left out of the fit"}, %{x:,} samples: %{y:.4f}<extra></extra>`,
      },
    ];
  }

  function lines(found, look) {
    const main = lineStyle(0, look.theme).color, other = lineStyle(1, look.theme).color, data = [], keys = [];
    if (found.fit) {
      const [measured, beyond] = cut(found.fit.curve, found.sizes.at(-1).samples);
      data.push(
        band(found.fit.curve, "band", `${main}30`), line(measured, "fit", { color: main }, "fit"),
        line(beyond, "beyond", { color: main, dash: "dot" }, "predicted"),
      );
      keys.push({ name: "fit, 90% band", color: main, mark: "line" }, { name: "predicted", color: main, mark: "dots" });
    }
    if (found.check && isNumber(found.check.up_to)) {
      const name = `predicted by the sizes up to ${commas(found.check.up_to)}`;
      const known = found.check.sizes.filter((row) => isNumber(row.low) && isNumber(row.high));
      data.push(line(cut(found.check.curve, found.check.up_to)[1], "check", { color: other, dash: "dash" }, name), predicted(known, other));
      keys.push({ name, color: other, mark: "dash" });
    }
    return { data, keys };
  }

  // What the small sizes predicted, with the intervals.
  const predicted = (rows, color) => ({
    type: "scatter", mode: "markers", uid: "predicted", x: rows.map((row) => row.samples), y: rows.map((row) => row.value),
    marker: { size: 11, symbol: "line-ew-open", color, line: { width: 2, color } },
    error_y: {
      type: "data", symmetric: false, array: rows.map((row) => row.high - row.value), arrayminus: rows.map((row) => row.value - row.low),
      color, thickness: 1.6, width: 6,
    },
    customdata: rows.map((row) => [commas(row.samples), span(row.low, row.high)]),
    hovertemplate: "predicted, %{customdata[0]} samples: %{y:.4f}%{customdata[1]}<extra></extra>",
  });

  const DIGITS = [1, 1.5, 2, 3, 4, 5, 7], POWERS = [-5, -4, -3, -2, -1, 0, 1, 2];

  // Ticks of a log axis that may span less than a decade.
  function errorTicks(low, high) {
    const all = POWERS.flatMap((power) => DIGITS.map((digit) => +(digit * 10 ** power).toPrecision(2)));
    const tickvals = all.filter((value) => value > low / 1.12 && value < high * 1.12);
    return tickvals.length > 1 ? { tickvals, ticktext: tickvals.map(plain) } : {};
  }

  function learningFigure(found, { look }) {
    const main = lineStyle(0, look.theme).color, drawn = lines(found, look), target = found.target > 0 ? found.target : null;
    const data = [...drawn.data, ...points(found, false, look), ...points(found, true, look)];
    const keys = [{ name: "one seed", color: main, mark: "ring" }, { name: "mean", color: main, mark: "disc" }, ...drawn.keys];
    if (found.sizes.some((size) => size.dropped && size.errors.length)) keys.push({ name: "left out of the fit", color: look.soft, mark: "ring" });
    if (target) keys.push({ name: `target ${plain(target)}`, color: look.good, mark: "dash" });
    const seen = [...data.filter(({ uid }) => uid !== "band").flatMap(({ y }) => y), target].filter((value) => value > 0);
    const { low, high } = rangeOf(seen) || { low: 0.1, high: 1 };
    const sizes = [...found.sizes, ...found.predictions].map((row) => row.samples), { low: first, high: last } = rangeOf(sizes);
    const ticks = look.narrow ? sizes.filter((_, index) => (sizes.length - 1 - index) % 2 === 0) : sizes;
    return {
      data, keys,
      layout: layout(
        look,
        {
          hovermode: "closest", uirevision: "learning", margin: { l: 56, r: 16, t: 8, b: 40 },
          shapes: target
            ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: target, y1: target, line: { color: look.good, width: 1.3, dash: "dash" } }]
            : [],
          xaxis: {
            title: { text: "training samples" }, type: "log", tickvals: ticks, ticktext: ticks.map(count), tickangle: 0,
            range: [Math.log10(first / 1.15), Math.log10(last * 1.15)],
          },
          yaxis: {
            title: { text: safe(found.metric) }, type: "log", range: [Math.log10(low / 1.12), Math.log10(high * 1.12)],
            ...errorTicks(low, high),
          },
        },
      ),
    };
  }

  const spread = (size) => (
    isNumber(size.mean) ? `${figure(size.mean)}${isNumber(size.sd) ? ` ± ${figure(size.sd)}` : ""} (${size.errors.length})` : "–"
  );

  // Lines about one thing: the first is a sentence, the others are its details.
  const paragraph = ([first, ...rest]) => node(
    "div", {}, node("p", { class: "text" }, first[0].toUpperCase() + first.slice(1)),
    rest.length ? node("ul", { class: "list text" }, ...rest.map((each) => node("li", {}, each.trim()))) : null,
  );

  const sizesTable = (found) => table({
    head: ["samples", `${found.metric}, mean ± sd (n)`, "epochs", "steps", "batch", "failed"], numbers: 1,
    caption: found.said.sizes.join("; "),
    rows: found.sizes.map((size) => [
      commas(size.samples), spread(size), ...["epochs", "steps", "batch", "failed"].map((name) => plain(size[name])),
    ]),
  });

  function learning(sources) {
    return sources.filter((source) => source.learning).flatMap((source) => {
      const found = source.learning, said = ["fit", "check", "predictions"].map((name) => found.said[name]).filter((each) => each.length);
      return [
        chart({
          key: `chart ${source.id}`, title: sources.length > 1 ? source.name : `${found.metric === "loss" ? "Loss" : "Error"} by size`,
          hint: "both axes logarithmic", wide: true, height: 400, figure: (plot) => learningFigure(found, plot),
          label: () => `Chart: ${found.metric} by training samples. ${found.sizes.map((size) => `${commas(size.samples)}: ${spread(size)}`).join("; ")}.`,
        }),
        {
          key: `words ${source.id}`, sign: found,
          make: () => node("div", { class: "card wide" }, ...said.map(paragraph), sizesTable(found)),
        },
      ];
    });
  }

  window.Paceline.sections.learning = { title: "Error against data size", grid: true, make: learning };
})();
