// Layers: how far each one moves in a step, relative to its weights, or the norm of its gradient, over the course of a run.
"use strict";
(() => {
  const {
    state, visible, trains, safe, clip, isNumber, plain, commas, node, chart, layout, rangeOf, column, xAxis,
  } = window.Paceline;

  const FAR = 100; // times above or below the median of the layers that move
  const KINDS = {
    update_ratio: { title: "Update-to-weight ratio", button: "Show gradient norms" },
    gradient_norm: { title: "Gradient norm", button: "Show update ratios" },
  };
  const kind = () => (state.gradients ? "gradient_norm" : "update_ratio");

  function figure(source, context) {
    const { look, x } = context, { layers } = source, values = layers[kind()], axis = xAxis([source], x);
    const placed = { ...source, series: { ...source.series, layers } }, at = column(placed, "layers", x) || [];
    const kept = at.map((_, index) => index).filter((index) => isNumber(at[index]));
    const logs = values.map((row) => kept.map((index) => (row[index] > 0 ? Math.log10(row[index]) : null)));
    const range = rangeOf(logs.flat()) || { low: -1, high: 0 };
    const z = logs.map((row, line) => row.map((value, place) => (values[line][kept[place]] === 0 ? range.low : value)));
    const ticks = ticksOf(range), every = Math.ceil(layers.names.length / 40), shown = layers.names.map((_, index) => index);
    const named = shown.filter((index) => index % every === 0);
    return {
      height: heightOf(layers),
      data: [
        {
          type: "heatmap", x: kept.map((index) => at[index] / axis.by), y: shown, z, zmin: range.low, zmax: range.high,
          colorscale: "Viridis", hoverongaps: false,
          colorbar: {
            thickness: look.narrow ? 8 : 12, outlinewidth: 0, tickvals: ticks, ticktext: ticks.map((tick) => String(+(10 ** tick).toPrecision(1))),
            tickfont: { color: look.ink },
          },
          customdata: values.map((row, line) => kept.map((index) => `${safe(clip(layers.names[line], 60))}: ${plain(row[index])}`)),
          hovertemplate: `%{customdata}<br>${axis.title} %{x:,.4~g}<extra></extra>`,
        },
      ],
      layout: layout(look, {
        hovermode: "closest", uirevision: `layers ${x}`,
        xaxis: { title: { text: axis.title }, showgrid: false, tickformat: x === "time_s" ? "" : ",.10~g" },
        yaxis: {
          tickvals: named, ticktext: named.map((index) => safe(clip(layers.names[index], look.narrow ? 14 : 34))),
          autorange: "reversed", fixedrange: true, showgrid: false, tickfont: { size: 11 },
        },
      }),
    };
  }

  const heightOf = ({ names }) => Math.max(200, Math.min(640, 80 + 18 * names.length));

  // Powers of ten; between two of them also 2 and 5 times the lower one.
  function ticksOf({ low, high }) {
    const steps = high - low > 2.5 ? [1] : [1, 2, 5], least = Math.ceil((high - low) / 6), found = [];
    for (let power = Math.floor(low); power <= high; power++) {
      if (steps.length === 1 && power % least) continue;
      for (const times of steps) found.push(power + Math.log10(times));
    }
    return found.filter((tick) => tick >= low - 1e-9 && tick <= high + 1e-9);
  }

  // Each layer's last ratio, and how many times the median of all layers that is.
  function last({ names, update_ratio: ratios, gradient_norm: norms }) {
    const ends = names.map((name, line) => ({ name, ratio: ratios[line].at(-1), norm: norms[line].at(-1) }));
    const sorted = ends.map(({ ratio }) => ratio).filter((ratio) => isNumber(ratio) && ratio > 0).sort((a, b) => a - b);
    const half = sorted.length >> 1;
    const median = sorted.length ? (sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2) : 0;
    return ends.map((end) => ({ ...end, times: isNumber(end.ratio) && median > 0 ? end.ratio / median : null }));
  }

  function farWords(source) {
    const far = last(source.layers).filter(({ times }) => times !== null && (times > FAR || times < 1 / FAR));
    const said = far.slice(0, 5).map(({ name, times }) => (
      times === 0
        ? `layer ${name} does not move`
        : `layer ${name} moves ${commas(Math.round(Math.max(times, 1 / times)))} times as ${times > 1 ? "fast" : "slowly"} as the median layer`
    ));
    const more = far.length > 5 ? `; so do ${far.length - 5} more` : "";
    const adapts = /^(lars|lamb)/.test((source.facts || {}).optimizer), uneven = far.some(({ times }) => times > 0);
    const advice = uneven && !adapts ? " LARS and LAMB give every layer a rate of its own." : "";
    return said.length ? `${source.name}: in the last row, ${said.join("; ")}${more}.${advice}` : "";
  }

  const switchTool = (key) => ({
    sign: state.gradients,
    make: () => node(
      "button",
      {
        type: "button", class: "button", "aria-pressed": String(state.gradients), "data-focus": `${key} gradients`,
        onclick: () => { state.gradients = !state.gradients; window.Paceline.redraw(); },
      },
      KINDS[kind()].button,
    ),
  });

  function layers(sources) {
    const runs = trains(visible(sources)).filter((source) => source.layers), items = [], about = runs.map(farWords).filter(Boolean);
    if (about.length) {
      items.push(
        { key: "about", sign: about, make: () => node("ul", { class: "list text" }, ...about.map((text) => node("li", {}, text))) }
      );
    }
    for (const source of runs) {
      const { names, count, step } = source.layers, key = `layers ${source.id}`, { title } = KINDS[kind()];
      const part = count > names.length ? `; ${names.length} of ${commas(count)} layers` : "";
      const said = state.gradients ? "before clipping" : "how far a step moves a layer's weights, relative to their norm";
      items.push(chart({
        key, title: runs.length > 1 ? `${title}, ${source.name}` : title, hint: `${said}; log scale${part}`, wide: true,
        height: heightOf(source.layers), figure: (plot) => figure(source, plot), tools: [switchTool(key)],
        label: () => `Chart: ${title.toLowerCase()} of ${names.length} layers of ${source.name} in ${step.length} steps, as colors.`,
        rows: () => ({
          head: ["layer, in the last row", "update-to-weight ratio", "times the median", "gradient norm"], numbers: 1,
          rows: last(source.layers).map(({ name, ratio, times, norm }) => [name, plain(ratio), isNumber(times) ? plain(+times.toPrecision(3)) : "–", plain(norm)]),
        }),
      }));
    }
    return items;
  }

  window.Paceline.sections.layers = { title: "Layers", make: layers };
})();
