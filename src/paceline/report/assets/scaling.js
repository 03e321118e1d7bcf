// Scaling: speed and efficiency by worker count, and the time of an all-reduce without training.
"use strict";
(() => {
  const { lineStyle, safe, clip, isNumber, seconds, bytes, commas, node, table, chart, layout } = window.Paceline;

  const counts = (source) => source.scale.counts;

  function workersAxis(sources) {
    const values = [...new Set(sources.flatMap((source) => counts(source).map((row) => row.workers)))].sort((a, b) => a - b);
    const log = values[values.length - 1] / values[0] > 16;
    return {
      title: { text: "workers" }, type: log ? "log" : "linear", tickvals: values, ticktext: values.map(commas),
      range: log
        ? [Math.log10(values[0] / 1.15), Math.log10(values[values.length - 1] * 1.15)]
        : [Math.max(0, values[0] - 0.5), values[values.length - 1] + 0.5],
      fixedrange: true,
    };
  }

  function scalingFigure(sources, context) {
    const { look } = context, data = [];
    for (const source of sources) {
      const rows = counts(source), style = lineStyle(context.color(source.id), look.theme), first = rows[0],
        name = sources.length > 1 ? clip(source.name, 30) : "measured";
      data.push({
        type: "scatter", mode: "lines", name: sources.length > 1 ? safe(`${name}, linear`) : "linear",
        x: rows.map((row) => row.workers), y: rows.map((row) => (first.samples_per_s / first.workers) * row.workers),
        line: { color: sources.length > 1 ? style.color : look.soft, dash: "dash", width: 1.3 },
        hovertemplate: "linear: %{y:,.4~r}<extra></extra>",
      });
      data.push({
        type: "scatter", mode: "lines+markers", name: safe(name), x: rows.map((row) => row.workers),
        y: rows.map((row) => row.samples_per_s), line: { color: style.color, width: 2.2 }, marker: { size: 9, color: style.color },
        error_y: {
          type: "data", symmetric: false,
          array: rows.map((row) => Math.max(0, (row.high ?? row.samples_per_s) - row.samples_per_s)),
          arrayminus: rows.map((row) => Math.max(0, row.samples_per_s - (row.low ?? row.samples_per_s))), color: style.color,
          thickness: 1.6, width: 6,
        },
        customdata: rows.map(
          (row) => (isNumber(row.low) && isNumber(row.high) ? ` (${commas(row.low)} to ${commas(row.high)})` : "")
        ),
        hovertemplate: `${safe(name)}: %{y:,.4~r}%{customdata}<extra></extra>`,
      });
    }
    const unit = sources[0].scale.unit;
    const keys = [
      ...sources.map((source) => ({
        name: sources.length > 1 ? source.name : "measured", color: lineStyle(context.color(source.id), look.theme).color,
        mark: "line",
      })),
      { name: "linear", color: look.soft, mark: "dash" },
    ];
    return {
      data, keys,
      layout: layout(
        look,
        {
          hovermode: "x unified", uirevision: "scaling", margin: { l: 56, r: 12, t: 8, b: 40 }, dragmode: false,
          xaxis: workersAxis(sources),
          yaxis: { title: { text: `${safe(unit)}/s` }, rangemode: "tozero", tickformat: ",.6~g", fixedrange: true },
        },
      ),
    };
  }

  function efficiencyFigure(sources, context) {
    const { look } = context, most = Math.max(1, ...sources.flatMap((source) => counts(source).map((row) => row.efficiency || 0)));
    const all = [...new Set(sources.flatMap((source) => counts(source).map((row) => row.workers)))].sort((a, b) => a - b);
    const data = sources.map((source) => {
      const rows = counts(source).filter((row) => isNumber(row.efficiency)),
        style = lineStyle(context.color(source.id), look.theme);
      return {
        type: "bar", name: safe(clip(source.name, 30)), x: rows.map((row) => all.indexOf(row.workers)),
        y: rows.map((row) => row.efficiency), marker: { color: style.color },
        text: rows.map((row) => `${Math.round(100 * row.efficiency)}%`), textposition: "auto", textangle: 0,
        insidetextfont: { color: look.theme === "dark" ? "#10141a" : "#fff" }, hovertemplate: "%{y:.1%}<extra></extra>",
      };
    });
    const keys = [
      ...(
        sources.length > 1
          ? sources.map(
            (source) => ({ name: source.name, color: lineStyle(context.color(source.id), look.theme).color, mark: "box" })
          )
          : []
      ),
      { name: "linear", color: look.soft, mark: "dash" },
    ];
    return {
      data, keys,
      layout: layout(
        look,
        {
          hovermode: "closest", uirevision: "efficiency", bargap: 0.35, dragmode: false,
          shapes: [
            { type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: look.soft, dash: "dash", width: 1.3 } },
          ],
          xaxis: {
            title: { text: "workers" }, tickvals: all.map((_, index) => index), ticktext: all.map(commas), fixedrange: true,
            showgrid: false,
          },
          yaxis: { title: { text: "share of linear" }, tickformat: ".0%", range: [0, most * 1.08], fixedrange: true },
        },
      ),
    };
  }

  function linksFigure(source, context) {
    const { look } = context, groups = new Map();
    for (const link of source.scale.links) groups.set(link.workers, [...(groups.get(link.workers) || []), link]);
    const data = [...groups].sort((a, b) => a[0] - b[0]).map(([workers, links], index) => {
      links.sort((a, b) => a.bytes - b.bytes);
      const style = lineStyle(index, look.theme);
      return {
        type: "scatter", mode: "lines+markers", name: `${commas(workers)} workers`, x: links.map((link) => link.bytes),
        y: links.map((link) => link.s * 1e3), line: { color: style.color, width: 1.8 }, marker: { size: 7 },
        customdata: links.map((link) => [bytes(link.bytes), seconds(link.s)]),
        hovertemplate: `${commas(workers)} workers, %{customdata[0]}: %{customdata[1]}<extra></extra>`,
      };
    });
    const sizes = [...new Set(source.scale.links.map((link) => link.bytes))].sort((a, b) => a - b),
      few = sizes.reduce((kept, size) => (kept.length && size < 3 * kept.at(-1) ? kept : [...kept, size]), []);
    return {
      data, keys: data.map((trace) => ({ name: trace.name, color: trace.line.color, mark: "line" })),
      layout: layout(
        look,
        {
          hovermode: "closest", uirevision: "links", margin: { l: 56, r: 12, t: 8, b: 40 }, dragmode: false,
          xaxis: { type: "log", title: { text: "message size" }, tickvals: few, ticktext: few.map(bytes), fixedrange: true },
          yaxis: { type: "log", title: { text: "ms" }, tickformat: "~g", fixedrange: true },
        },
      ),
    };
  }

  function scaling(sources) {
    const found = sources.filter((source) => source.scale && source.scale.counts.length);
    if (!found.length) return [];
    const items = found.filter((source) => source.scale.verdict).map((source) => (
      {
        key: `verdict ${source.id}`, sign: source.scale.verdict, make: () => node("p", { class: "verdict wide" }, source.scale.verdict),
      }
    ));
    const said = (what) => found.map(
      (source) => `${source.name}: ${source.scale.counts.map((row) => `${row.workers} worker${row.workers === 1 ? "" : "s"} ${what(row)}`).join(", ")}`
    ).join("; ");
    const rows = () => scaleRows(found);
    items.push(chart({
      key: "speed", title: "Speed compared with linear scaling", hint: "bars: slowest and fastest window",
      figure: (plot) => scalingFigure(found, plot),
      label: () => `Chart: speed by workers. ${said((row) => commas(row.samples_per_s))}.`,
    }));
    if (found.some((source) => source.scale.counts.some((row) => isNumber(row.efficiency)))) {
      items.push(chart({
        key: "efficiency", title: "Efficiency", hint: "speed per worker, relative to the smallest count",
        figure: (plot) => efficiencyFigure(found, plot),
        label: () => `Chart: efficiency by workers. ${said((row) => `${Math.round(100 * (row.efficiency || 0))}%`)}.`,
      }));
    }
    items.push({
      key: "table", sign: found.map((source) => [source.name, source.scale]),
      make: () => node(
        "div", { class: "card wide" },
        table(
          { ...rows(), caption: `Every worker count${found.length === 1 && found[0].scale.mode ? `, ${found[0].scale.mode} scaling` : ""}` }
        ),
      ),
    });
    for (const source of found) {
      if (source.scale.links.length > 1) {
        items.push(chart({
          key: `links ${source.id}`, title: found.length > 1 ? `All-reduce without training: ${source.name}` : "An all-reduce without training",
          hint: "medians; the workers do nothing else", wide: true, height: 260, figure: (plot) => linksFigure(source, plot),
          label: () => "Chart: time of an all-reduce by message size.",
          rows: () => ({
            head: ["workers", "message", "time"],
            rows: source.scale.links.map((link) => [commas(link.workers), bytes(link.bytes), seconds(link.s)]), numbers: 1,
          }),
        }));
      }
    }
    return items;
  }

  function scaleRows(found) {
    const several = found.length > 1, unit = found[0].scale.unit;
    const rows = found.flatMap((source) => source.scale.counts.map((row) => [
      `${several ? source.name + ": " : ""}${commas(row.workers)}`,
      isNumber(row.virtual_workers) ? commas(row.virtual_workers) : "–",
      isNumber(row.global_batch) ? commas(row.global_batch) : "–", commas(row.samples_per_s),
      isNumber(row.low) && isNumber(row.high) ? `${commas(row.low)} – ${commas(row.high)}` : "–",
      isNumber(row.speed_up) ? row.speed_up.toFixed(2) : "–",
      isNumber(row.efficiency) ? `${(100 * row.efficiency).toFixed(1)}%` : "–",
      isNumber(row.step_s) ? seconds(row.step_s) : "–", isNumber(row.reduce_s) ? seconds(row.reduce_s) : "–",
      isNumber(row.gradient_bytes) ? bytes(row.gradient_bytes) : "–",
      isNumber(row.memory_bytes) ? bytes(row.memory_bytes) : "–",
    ]));
    return {
      head: [
        "workers", "V", "global batch", `${unit}/s`, "lowest – highest", "speed-up", "efficiency", "step", "all-reduce alone",
        "gradients", "memory",
      ],
      rows, numbers: 0,
    };
  }

  window.Paceline.sections.scaling = { title: "Scaling", grid: true, make: scaling };
})();
