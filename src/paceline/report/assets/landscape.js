// The loss along lines, between models, and over planes (surface.js draws those).
"use strict";
(() => {
  const {
    state, visible, lineStyle, colorPlace, safe, uid, clip, isNumber, plain, figure, node, chart, layout, hasWebGL, scaleOf,
    contourFigure, solidFigure, turn,
  } = window.Paceline;
  const isSurface = ({ kind }) => kind === "plane" || kind === "path";
  const both = ({ kind, sets }) => !isSurface({ kind }) && sets.some((set) => set.accuracy);
  const DASHES = new Map([["train", "solid"], ["validation", "dash"]]), OTHERS = ["dot", "dashdot", "longdash"];

  // The models on a line, [[x, name]].
  const modelsOf = ({ kind, ends }) => (
    kind === "between" ? [[0, ends[0] || "first model"], [1, ends[1] || "second model"]] : [[0, "the model"]]
  );

  function lineFigure(found, measure, source, context) {
    const { look } = context, { color } = lineStyle(colorPlace(source.id), look.theme);
    const sets = found.sets.filter((set) => set[measure]);
    const dash = ({ name }, place) => DASHES.get(name) || (place ? OTHERS[place % OTHERS.length] : "solid");
    const { log, ticks } = measure === "loss" ? scaleOf(sets.flatMap((set) => set.loss)) : { log: false };
    const data = sets.map((set, place) => ({
      type: "scatter", mode: found.x.length < 3 ? "lines+markers" : "lines", name: safe(set.name), uid: uid(measure, set.name),
      x: found.x, y: set[measure], connectgaps: false,
      line: { color, width: set.name === "train" ? 2 : 1.8, dash: dash(set, place) },
      hovertemplate: `${safe(clip(set.name, 20))}: %{y:,.5~g}<extra></extra>`,
    }));
    const models = modelsOf(found).filter(([x]) => x >= found.x[0] && x <= found.x.at(-1)), wide = found.x.at(-1) - found.x[0];
    const upright = { type: "line", yref: "paper", y0: 0, y1: 1, layer: "below" };
    const shapes = models.map(([x]) => ({ ...upright, x0: x, x1: x, line: { color: look.soft, width: 1.2, dash: "dot" } }));
    const annotations = models.map(([x, name]) => ({
      x, y: 1, yref: "paper", yanchor: "bottom", showarrow: false, text: safe(clip(name, look.narrow ? 16 : 28)),
      font: { size: 12, color: look.ink }, // beside the line where there is no room on one side
      xanchor: x - found.x[0] < 0.15 * wide ? "left" : found.x.at(-1) - x < 0.15 * wide ? "right" : "center",
    }));
    return {
      data, keys: sets.map((set, place) => ({ name: set.name, color, mark: dash(set, place) === "solid" ? "line" : "dash" })),
      layout: layout(look, {
        hovermode: "x unified", shapes, annotations, uirevision: `${measure} ${log}`, margin: { l: 48, r: 14, t: 24, b: 40 },
        xaxis: {
          title: { text: found.kind === "between" ? "share of the way to the second model" : "distance along the direction" },
          hoverformat: ".3~g", nticks: look.narrow ? 5 : 9,
        },
        yaxis: log
          ? { type: "log", tickvals: ticks, ticktext: ticks.map(plain), title: { text: "log scale" } }
          : { tickformat: ",.6~g", nticks: 7 },
      }),
    };
  }

  const number = (value) => (isNumber(value) ? figure(value) : "–");

  function lineRows(found) {
    const columns = found.sets.flatMap((set) => ["loss", "accuracy"].filter((measure) => set[measure])
      .map((measure) => [`${set.name} ${measure}`, set[measure]]));
    const every = Math.ceil(found.x.length / 200);
    return {
      head: ["x", ...columns.map(([name]) => name)], numbers: 0,
      rows: found.x.map((x, index) => [plain(x), ...columns.map(([, values]) => number(values[index]))])
        .filter((_, index) => index % every === 0),
    };
  }

  // The lowest and the highest loss of a set on a surface, and where they are: [{loss, x, y}].
  function extremes(found, set) {
    let low = null, high = null;
    set.loss.forEach((row, down) => row.forEach((loss, across) => {
      if (!isNumber(loss)) return;
      const here = { loss, x: found.x[across], y: found.y[down] };
      if (!low || loss < low.loss) low = here;
      if (!high || loss > high.loss) high = here;
    }));
    return [low, high];
  }

  function surfaceRows(found) {
    const line = (what, { loss, x, y }) => [what, plain(+x.toPrecision(4)), plain(+y.toPrecision(4)), number(loss)];
    const rows = found.sets.flatMap((set) => extremes(found, set)
      .map((point, place) => line(`${place ? "highest" : "lowest"} ${set.name} loss that is drawn`, point)));
    for (const path of found.paths) {
      path.x.forEach((x, index) => rows.push(
        line(`${path.name || "the run"}, step ${plain(path.step[index])}`, { x, y: path.y[index], loss: path.loss[index] }),
      ));
    }
    return { head: ["what", "x", "y", "loss"], rows, numbers: 1 };
  }

  const listed = (names) => (names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0] || "");

  function titleOf(found, source, sources) {
    const names = found.paths.map((path) => clip(path.name, 40)).filter(Boolean);
    const title = {
      line: "Along a line", plane: "Around the model", between: `Between ${listed(found.ends) || "two models"}`,
      path: names.length > 3
        ? `Paths of ${names.length} runs` : names.length > 1 ? `Paths of ${listed(names)}` : "Path of the run",
    }[found.kind];
    const alike = source.landscapes.filter((each) => each.kind === found.kind).length;
    const whole = alike > 1 && found.kind !== "between" ? `${title} (${found.name})` : title;
    return sources.length > 1 ? `${source.name}: ${whole[0].toLowerCase()}${whole.slice(1)}` : whole;
  }

  // The buttons of a surface: which set, contours or 3-D, and to turn it.
  function surfaceTools(key, found, set, solid) {
    const plotOf = (event) => event.target.closest("article").inner.plot;
    const pick = (name) => node(
      "button",
      {
        type: "button", "aria-pressed": String(set.name === name), "data-focus": `${key} set ${name}`,
        onclick: (event) => {
          const { scene } = plotOf(event).layout;
          if (solid && scene) state.solid.set(key, scene.camera);
          state.set.set(key, name);
          window.Paceline.redraw();
        },
      },
      clip(name, 20),
    );
    const turned = (degrees, sign, words) => node(
      "button",
      {
        type: "button", class: "button", "aria-label": words, title: words, "data-focus": `${key} ${words}`,
        onclick: (event) => turn(plotOf(event), degrees),
      },
      sign,
    );
    const sets = found.sets.map(({ name }) => name), wish = state.solid.has(key);
    return [
      ...(sets.length > 1 ? [{
        sign: [sets, set.name],
        make: () => node("span", { class: "switch", role: "group", "aria-label": "Samples shown" }, ...sets.map(pick)),
      }] : []),
      {
        sign: [wish, solid],
        make: () => node(
          "span", { class: "tools" }, ...(solid ? [turned(-15, "↺", "Turn left"), turned(15, "↻", "Turn right")] : []),
          node(
            "button",
            {
              type: "button", class: "button", "data-focus": `${key} view`,
              onclick: () => { wish ? state.solid.delete(key) : state.solid.set(key, null); window.Paceline.redraw(); },
            },
            wish && solid ? "Contours" : "3-D",
          ),
        ),
      },
    ];
  }

  function surfaceCard(found, source, sources, wide) {
    const key = `landscape ${source.id} ${found.name}`, solid = state.solid.has(key) && hasWebGL();
    const set = found.sets.find(({ name }) => name === state.set.get(key)) || found.sets[0], [low, high] = extremes(found, set);
    const gaps = set.loss.some((row) => row.some((loss) => !isNumber(loss)));
    const hint = [
      state.solid.has(key) && !solid ? "This browser has no WebGL, which 3-D needs: the contours show the same." : "",
      found.about, gaps ? "Gaps: the loss is not finite." : "", found.thinned ? "Not all points are drawn." : "",
    ].filter(Boolean).join(" ");
    return chart({
      key, title: titleOf(found, source, sources), hint, wide, height: 460, tools: surfaceTools(key, found, set, solid),
      figure: (plot) => (solid ? solidFigure(found, set, plot, state.solid.get(key)) : contourFigure(found, set, plot)),
      label: () => (
        `Chart: ${solid ? "surface" : "contours"} of the ${set.name} loss, from ${figure(low.loss)} to ${figure(high.loss)}. `
        + found.about
      ),
      rows: () => surfaceRows(found),
    });
  }

  function lineCard(found, measure, source, sources, wide) {
    const title = titleOf(found, source, sources), range = (set) => set[measure].filter(isNumber);
    const said = found.sets.filter((set) => set[measure] && range(set).length)
      .map((set) => `${set.name} from ${figure(Math.min(...range(set)))} to ${figure(Math.max(...range(set)))}`);
    const thinned = found.thinned ? " Not all points are drawn." : "";
    return chart({
      key: `landscape ${source.id} ${found.name} ${measure}`, title: `${title}: ${measure}`, wide,
      hint: measure === "loss" ? `${found.about}${thinned}` : "", figure: (plot) => lineFigure(found, measure, source, plot),
      label: () => `Chart: ${measure} ${title.toLowerCase()}. ${said.join("; ")}.`, rows: () => lineRows(found),
    });
  }

  function landscape(sources) {
    const rank = (found) => (both(found) ? 0 : ["plane", "path"].indexOf(found.kind) + 2); // planes of several runs side by side
    const all = visible(sources).flatMap((source) => (source.landscapes || []).map((found) => ({ source, found })))
      .sort((a, b) => rank(a.found) - rank(b.found));
    const single = all.filter(({ found }) => !both(found));
    const last = single.length % 2 ? single.at(-1) : null; // it has a row to itself
    const items = all.flatMap((each) => {
      const { source, found } = each, wide = each === last;
      if (isSurface(found)) return [surfaceCard(found, source, sources, wide)];
      const measures = both(found) ? ["loss", "accuracy"] : ["loss"];
      return measures.map((measure) => lineCard(found, measure, source, sources, wide));
    });
    return all.some(({ found }) => found.facts.length) ? [...items, measured(all, sources)] : items;
  }

  // How each surface was measured, folded.
  const measured = (all, sources) => ({
    key: "landscape measured", sign: all.map(({ source, found }) => [source.name, found.name, found.facts, sources.length]),
    make: () => node(
      "details", { class: "wide" }, node("summary", { "data-focus": "landscape measured" }, "How these were measured"),
      node("ul", { class: "list" }, ...all.map(({ source, found }) => node(
        "li", {}, node("strong", {}, sources.length > 1 ? `${source.name}, ${found.name}` : found.name),
        `: ${found.facts.join(", ")}`,
      ))),
    ),
  });

  window.Paceline.sections.landscape = { title: "Loss surface", grid: true, make: landscape };
})();
