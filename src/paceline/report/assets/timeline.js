// The timeline of a few profiled steps: one row per worker, and DDP's buckets below.
"use strict";
(() => {
  const { state, visible, safe, clip, isNumber, seconds, bytes, plain, node, table, chart, layout, keysOf } = window.Paceline;

  const SPANS = {
    light: {
      input: "#00845f", forward: "#56a9d9", backward: "#0072b2", hidden: "#f2cf7e", exposed: "#d97f00", waiting: "#d55e00",
      optimizer: "#b0458a", other: "#8b93a1",
    },
    dark: {
      input: "#2fcb9c", forward: "#8fd0f5", backward: "#3d94cf", hidden: "#7d6a35", exposed: "#ffb31a", waiting: "#ff8a4c",
      optimizer: "#e58fc2", other: "#8b95a5",
    },
  };
  const SPAN_WORDS = { hidden: "all-reduce, hidden by the backward pass", exposed: "all-reduce, exposed", waiting: "waiting for slower workers" };

  // One row per worker with two lanes: its computation above, its all-reduces below.
  function timelineFigure(timeline, context, range) {
    const { look } = context, place = new Map(timeline.workers.map((worker, index) => [worker, index])),
      kinds = Object.keys(SPANS.light);
    const data = [];
    for (const kind of kinds) {
      const bars = timeline.bars.filter((bar) => bar.kind === kind);
      if (!bars.length) continue;
      const dark = look.theme === "dark",
        ink = kind === "hidden" ? look.ink : dark ? "#10141a" : kind === "forward" || kind === "exposed" ? "#1a1e26" : "#fff";
      data.push({
        type: "bar", orientation: "h", name: SPAN_WORDS[kind] || kind, meta: SPAN_WORDS[kind] || kind, uid: kind,
        base: bars.map((bar) => bar.start_ms), x: bars.map((bar) => bar.took_ms),
        y: bars.map((bar) => place.get(bar.worker) + (bar.lane ? 0.22 : -0.2)), width: bars.map((bar) => (bar.lane ? 0.3 : 0.46)),
        marker: { color: SPANS[look.theme][kind], line: { color: look.card, width: 0.6 } }, textposition: "inside",
        insidetextanchor: "middle", textangle: 0, insidetextfont: { color: ink, size: 11 }, constraintext: "none", cliponaxis: true,
        text: bars.map((bar) => label(bar, timeline, context, range)), customdata: bars.map(spanWords),
        hovertemplate: "%{customdata}<extra></extra>",
      });
    }
    const shapes = [], annotations = [];
    timeline.steps.forEach((step, index) => {
      if (range && (step.start_ms < range[0] || step.end_ms > range[1])) return;
      if (index) {
        shapes.push({
          type: "line", x0: step.start_ms, x1: step.start_ms, yref: "paper", y0: 0, y1: 1,
          line: { color: look.soft, width: 1, dash: "dot" },
        });
      }
      annotations.push({
        x: step.start_ms, y: 1, yref: "paper", yanchor: "bottom", xanchor: "left", text: `step ${step.step}`, showarrow: false,
        font: { size: 11, color: look.soft },
      });
    });
    for (let row = 1; row < timeline.workers.length; row++) {
      shapes.push(
        { type: "line", xref: "paper", x0: 0, x1: 1, y0: row - 0.5, y1: row - 0.5, line: { color: look.line, width: 1 } }
      );
    }
    const height = 66 + Math.max(70, 62 * timeline.workers.length);
    return {
      height, data, keys: keysOf(data),
      layout: layout(look, {
        barmode: "overlay", hovermode: "closest", shapes, annotations, uirevision: `timeline ${range}`,
        margin: { l: 64, r: 12, t: 20, b: 40 },
        xaxis: { title: { text: "ms" }, range: range || [0, timeline.end_ms], tickformat: ",.6~g", side: "bottom" },
        yaxis: {
          tickvals: timeline.workers.map((_, index) => index),
          ticktext: timeline.workers.map((worker) => (look.narrow ? `w ${worker}` : `worker ${worker}`)),
          range: [timeline.workers.length - 0.5, -0.5], fixedrange: true, showgrid: false,
        },
      }),
    };
  }

  // A bar has a label if there is room for it: about 6.5 px per letter.
  function label(bar, timeline, context, range) {
    const name = bar.kind === "hidden" || bar.kind === "exposed" ? (isNumber(bar.bucket) ? String(bar.bucket) : "") : bar.name;
    const span = range ? range[1] - range[0] : timeline.end_ms, room = (bar.took_ms / span) * (context.look.width - 90);
    return safe(name.length * 6.5 + 4 < room ? name : "");
  }

  function spanWords(bar) {
    const lines = [`<b>${safe(bar.name)}</b>, worker ${bar.worker}${isNumber(bar.step) ? `, step ${bar.step}` : ""}`];
    lines.push(
      isNumber(bar.all_ms)
        ? `took ${seconds(bar.all_ms / 1e3)}, ${seconds(bar.hidden_ms / 1e3)} of it hidden by the backward pass`
        : `took ${seconds(bar.took_ms / 1e3)}`
    );
    if (isNumber(bar.bytes)) lines.push(bytes(bar.bytes));
    return lines.join("<br>");
  }

  function timeline(sources) {
    const items = [];
    for (const source of visible(sources)) {
      const found = source.timeline;
      if (!found) continue;
      const name = sources.length > 1 ? `${source.name}: a few steps` : "A few steps on each worker";
      const first = innerWidth < 640 && found.steps.length > 1 ? found.steps[0].step : undefined; // a phone has room for one step
      const picked = state.step.has(source.id) ? state.step.get(source.id) : first,
        chosen = found.steps.find((each) => each.step === picked), pad = chosen ? (chosen.end_ms - chosen.start_ms) * 0.02 : 0;
      const range = chosen ? [chosen.start_ms - pad, chosen.end_ms + pad] : null;
      const pick = (value, word) => node(
        "button",
        {
          type: "button", "aria-pressed": String(picked === value), "data-focus": `${source.id} step ${value}`,
          onclick: () => { state.step.set(source.id, value); window.Paceline.redraw(); },
        },
        word,
      );
      const tools = found.steps.length > 1 && found.steps.length <= 10
        ? [
          {
            sign: picked ?? null,
            make: () => node(
              "span", { class: "switch", role: "group", "aria-label": "Steps shown" }, pick(undefined, "all"),
              ...found.steps.map((each) => pick(each.step, `step ${each.step}`)),
            ),
          },
        ]
        : [];
      const facts = [
        found.backend && `backend ${found.backend}`, found.reduce && `reduce ${found.reduce}`,
        found.replayed && "these steps were launched kernel by kernel; the others are replayed from a CUDA graph",
      ].filter(Boolean).join(", ");
      const took = (kind) => found.bars.filter((bar) => bar.kind === kind).reduce((sum, bar) => sum + bar.took_ms, 0),
        hidden = took("hidden"), exposed = took("exposed");
      const overlap = hidden + exposed > 0
        ? `${Math.round((100 * hidden) / (hidden + exposed))}% of the all-reduce time is hidden by the backward pass` : "";
      items.push(chart({
        key: `timeline ${source.id}`, title: name, hint: [facts, overlap].filter(Boolean).join("; "), wide: true, tools,
        height: 66 + Math.max(70, 62 * found.workers.length), figure: (plot) => timelineFigure(found, plot, range),
        label: () => `Chart: timeline of ${found.steps.length} steps on ${found.workers.length} workers. ${overlap}.`,
        rows: () => ({
          head: ["worker", "step", "what", "starts at", "takes"],
          rows: found.bars.slice(0, 400).map((bar) => [
            `worker ${bar.worker}`, plain(bar.step), bar.kind === "hidden" ? `${bar.name} (hidden by the backward pass)` : bar.name,
            seconds(bar.start_ms / 1e3), seconds(bar.took_ms / 1e3),
          ]),
          numbers: 3,
        }),
      }));
      items.push({ key: `buckets ${source.id}`, sign: [found.buckets, found.left_out, found.cut], make: () => buckets(found) });
    }
    return items;
  }

  function buckets(found) {
    const card = node("div", { class: "card" });
    if (found.buckets.length) {
      const optional = (value, words) => (isNumber(value) ? words(value) : "–");
      card.append(table({
        head: ["bucket", "size", "ready after", "takes", "hidden", "parameters"],
        rows: found.buckets.map((row) => [
          optional(row.bucket, String), optional(row.bytes, bytes), optional(row.ready_s, seconds),
          optional(row.took_s, seconds),
          isNumber(row.hidden_s) && row.took_s > 0 ? `${Math.round((100 * row.hidden_s) / row.took_s)}%` : "–",
          clip(`${row.count}: ${row.parameters.join(", ")}`, 160),
        ]),
        caption: "Buckets, in the order they are reduced. Ready: time since the backward pass began. Means over steps and workers",
        numbers: 1,
      }));
      card.querySelectorAll("tr > :last-child").forEach((cell) => cell.classList.replace("num", "words"));
    }
    const left = [
      found.left_out ? `${found.left_out} more workers are in the file.` : "", found.cut ? "Only the first spans are drawn." : "",
    ].filter(Boolean).join(" ");
    card.append(
      node("p", { class: "text soft" }, `The record's timeline.json also opens in ui.perfetto.dev or chrome://tracing. ${left}`)
    );
    return card;
  }

  window.Paceline.sections.timeline = { title: "Timeline", make: timeline };
})();
