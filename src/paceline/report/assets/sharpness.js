// Sharpness: how fast the loss rises around the model, in one table for all runs, and the spectrum of its curvature.
"use strict";
(() => {
  const {
    visible, lineStyle, colorPlace, safe, uid, clip, isNumber, commas, plain, figure, node, table, chart, layout,
  } = window.Paceline;
  const FLOOR = 1e-6; // of the largest density: what is below is rounding

  const value = (number) => (isNumber(number) ? plain(+number.toPrecision(4)) : "–");
  const boxes = (found) => new Map(found.keskar.map((row) => [`${row.space} ${row.epsilon}`, row]));

  // The rows of the table: [name, what it means, the text of a run].
  function measures(all) {
    const rises = (name, field, meaning) => {
      const rhos = [...new Set(all.map((found) => found[field].rho).filter(isNumber))];
      return rhos.map((rho) => [
        `${name}, ρ = ${plain(rho)}`, meaning, ({ [field]: { rho: own, rise } }) => (own === rho ? value(rise) : "–"),
      ]);
    };
    const keskar = [...new Map(all.flatMap((found) => [...boxes(found)]))].map(([id, { space, epsilon }], place) => [
      `Keskar's, ${space === "full" ? "" : `${space}, `}ε = ${plain(epsilon)}`,
      place
        ? `the same${space === "full" ? "" : " within a random subspace"}`
        : `largest rise of the loss within a box around the weights, of about ε times their size, in % of 1 + loss`,
      (found) => value((boxes(found).get(id) || {}).sharpness),
    ]);
    const trace = ({ trace, trace_error: error }) => (
      isNumber(error) ? `${value(trace)} ± ${plain(+error.toPrecision(2))}` : value(trace)
    );
    return [
      ["loss", "at the model, on the samples below", ({ loss }) => (isNumber(loss) ? figure(loss) : "–")],
      [
        "largest eigenvalue", "curvature in the steepest direction: plain gradient descent is stable at learning rates below 2 / this",
        ({ top }) => value(top[0]),
      ],
      ["trace", "sum of all curvatures, with its standard error", trace],
      ...rises("SAM's rise", "sam", "rise of the loss after a step of length ρ along the gradient"),
      ...rises("adaptive rise", "adaptive", "the same with steps in proportion to each weight: scaling a layer does not change it"),
      ...keskar, ["samples", "the loss is a mean over them", ({ samples }) => (isNumber(samples) ? commas(samples) : "–")],
    ].filter(([, , text]) => all.some((found) => text(found) !== "–"));
  }

  function summary(shown, sources) {
    const rows = measures(shown.map((source) => source.sharpness));
    return {
      key: "sharpness", sign: [shown.map((source) => [source.id, source.name, source.sharpness]), sources.length],
      make: () => {
        const box = table({
          head: ["measure", ...shown.map((source) => (sources.length > 1 ? source.name : "value")), "what it means"],
          numbers: 1,
          rows: rows.map(([name, meaning, text]) => [name, ...shown.map((source) => text(source.sharpness)), meaning]),
          caption: "The smaller, the flatter. Compare only runs of the same model on the same samples.",
        });
        box.querySelectorAll("tr > :last-child").forEach((cell) => cell.classList.replace("num", "words"));
        box.querySelectorAll("thead th").forEach((cell) => cell.classList.add("wrapped"));
        box.querySelectorAll("tbody th").forEach((cell) => cell.classList.add("long"));
        return node("article", { class: "card wide" }, box);
      },
    };
  }

  function densityFigure(shown, sources, context) {
    const { look } = context, most = Math.max(...shown.flatMap(({ sharpness }) => sharpness.density.y)), floor = most * FLOOR;
    const data = [], shapes = [], keys = [];
    for (const source of shown) {
      const { density, top } = source.sharpness, { color, dash } = lineStyle(colorPlace(source.id), look.theme);
      const name = sources.length > 1 ? clip(source.name, 30) : "";
      data.push({
        type: "scatter", mode: "lines", uid: uid("density", source.id), x: density.x,
        y: density.y.map((y) => Math.max(y, floor / 10)), line: { color, width: 1.8, dash },
        hovertemplate: `${safe(name)}${name ? ": " : ""}density %{y:.3~g} at %{x:.4~g}<extra></extra>`,
      });
      data.push({
        type: "scatter", mode: "markers", uid: uid("top", source.id), x: top, y: top.map(() => floor * 1.6), cliponaxis: false,
        marker: { symbol: "triangle-up", size: 11, color, line: { width: 1, color: look.card } },
        hovertemplate: `${safe(name)}${name ? ": " : ""}eigenvalue %{x:.5~g}<extra></extra>`,
      });
      const upright = { type: "line", yref: "paper", y0: 0, y1: 1, layer: "below", opacity: 0.6 };
      shapes.push(...top.map((x) => ({ ...upright, x0: x, x1: x, line: { color, width: 1, dash: "dot" } })));
      if (name) keys.push({ name, color, mark: dash === "solid" ? "line" : "dash" });
    }
    return {
      data, keys: [...keys, { name: "largest eigenvalues", color: look.soft, mark: "tick" }],
      layout: layout(look, {
        hovermode: "closest", shapes, uirevision: "density",
        xaxis: { title: { text: "curvature (eigenvalue of the Hessian)" }, nticks: look.narrow ? 5 : 10 },
        yaxis: { type: "log", title: { text: "density" }, range: [Math.log10(floor), Math.log10(most * 2)], nticks: 7 },
      }),
    };
  }

  const top = ({ name, sharpness }) => `${name}: largest ${sharpness.top.length ? value(sharpness.top[0]) : "unknown"}`;

  function sharpness(sources) {
    const shown = visible(sources).filter((source) => source.sharpness);
    if (!shown.length) return [];
    const dense = shown.filter((source) => source.sharpness.density.y.some((y) => y > 0));
    const counts = [...new Set(dense.map((source) => source.sharpness.density.vectors).filter(isNumber))];
    return [summary(shown, sources), ...(dense.length ? [chart({
      key: "density", title: "Spectrum of the curvature", wide: true, height: 300,
      hint: counts.length === 1
        ? `estimated from ${commas(counts[0])} random vector${counts[0] === 1 ? "" : "s"}` : "an estimate",
      figure: (plot) => densityFigure(dense, sources, plot),
      label: () => `Chart: density of the Hessian's eigenvalues. ${dense.slice(0, 6).map(top).join("; ")}.`,
      rows: () => ({
        head: ["run", "eigenvalue", "density"], numbers: 1,
        rows: dense.flatMap(({ name, sharpness: { density } }) => density.x
          .map((x, index) => [name, plain(x), plain(density.y[index])])
          .filter((_, index) => index % Math.ceil(density.x.length / 200) === 0)),
      }),
    })] : [])];
  }

  window.Paceline.sections.sharpness = { title: "Sharpness", make: sharpness };
})();
