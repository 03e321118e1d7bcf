// Studies: the arms and their verdicts.
"use strict";
(() => {
  const {
    state, lineStyle, safe, clip, isNumber, plain, figure, time, node, table, chart, allTool, layout, rangeOf, robustRange,
  } = window.Paceline;

  // The range of the axis if some arms are far from the reference and the best arm; null if all fit.
  function armsRange(study) {
    const spread = (arm) => rangeOf([...arm.values, arm.mean - (arm.sd || 0), arm.mean + (arm.sd || 0)]);
    const arms = study.arms.filter((arm) => arm.values.length), sign = study.metric === "accuracy" ? -1 : 1;
    if (arms.length < 2) return null;
    const best = [...arms].sort((a, b) => sign * (a.mean - b.mean))[0], groups = new Map(arms.map((arm) => [arm, spread(arm)]));
    const chosen = arms.filter((arm) => arm.reference || arm === best).map((arm) => groups.get(arm));
    const first = { ...rangeOf(chosen.flatMap(({ low, high }) => [low, high])) };
    return robustRange([first, ...groups.values()], first, { failed: 6 }, 2 * study.margin);
  }

  const isFar = (arm, range) => Boolean(range) && isNumber(arm.mean) && (arm.mean < range.low || arm.mean > range.high);

  // The values of arms outside the axis, as arrows at its edge.
  function edgeMarks(arms, colors, range) {
    return arms.flatMap((arm, index) => {
      if (!isFar(arm, range)) return [];
      const below = arm.mean < range.low, inset = 0.012 * (range.high - range.low);
      return [{
        type: "scatter", mode: "markers+text", uid: `far${index}`, x: [below ? range.low + inset : range.high - inset], y: [index],
        text: [figure(arm.mean)], textposition: below ? "middle right" : "middle left",
        textfont: { color: colors[index], size: 12 },
        marker: { size: 11, symbol: below ? "triangle-left" : "triangle-right", color: colors[index] }, cliponaxis: false,
        hovertemplate: `<b>${safe(clip(arm.name, 60))}</b><br>${safe(arm.spread)}, outside the axis<extra></extra>`,
      }];
    });
  }

  // What to say in the row of an arm without a value.
  const lost = (arms, look) => arms.flatMap((arm, index) => (
    isNumber(arm.mean)
      ? []
      : [{
        xref: "paper", x: 0, xanchor: "left", xshift: 8, y: index, showarrow: false,
        font: { color: arm.failed ? look.bad : look.soft, size: 12 }, bgcolor: look.card,
        text: safe(`no value: ${arm.failed} of ${arm.runs} did not finish`),
      }]
  ));

  function studyFigure(study, context) {
    const { look, range } = context, arms = study.arms.filter((arm) => arm.values.length || arm.runs),
      seeds = arms.flatMap((arm, index) => arm.values.map((value) => [value, index]));
    const tones = {
      better: look.good, equal: look.good, "no worse": look.good, worse: look.bad, undecided: look.warn, reference: look.ink,
    }, colors = arms.map((arm) => tones[arm.verdict] || look.soft);
    const data = [
      ...arms.map((arm, index) => ({
        visible: isNumber(arm.mean), type: "scatter", mode: "markers", uid: `mean${index}`, x: [arm.mean], y: [index],
        marker: { size: 13, symbol: "line-ns-open", color: colors[index], line: { width: 3, color: colors[index] } },
        error_x: { type: "data", array: [arm.sd || 0], visible: Boolean(arm.sd), color: colors[index], thickness: 2, width: 5 },
        hovertemplate: `<b>${safe(clip(arm.name, 60))}</b><br>${safe(study.metric)} ${safe(arm.spread)}<br>${safe(arm.verdict)}<extra></extra>`,
      })),
      {
        type: "scatter", mode: "markers", uid: "seeds", x: seeds.map(([value]) => value), y: seeds.map(([, index]) => index),
        marker: { size: 6, color: look.card, line: { width: 1.5, color: lineStyle(0, look.theme).color } },
        hovertemplate: "one seed: %{x:.4f}<extra></extra>",
      },
    ];
    data.push(...edgeMarks(arms, colors, range));
    const mean = study.reference_mean, across = { layer: "below", yref: "paper", y0: 0, y1: 1 };
    const shapes = isNumber(mean)
      ? [
        {
          ...across, type: "rect", x0: mean - study.margin, x1: mean + study.margin, fillcolor: look.accentSoft, line: { width: 0 },
        },
        { ...across, type: "line", x0: mean, x1: mean, line: { color: look.soft, width: 1, dash: "dash" } },
      ]
      : [];
    const verdicts = [
      ["better, equal or no worse", look.good], ["undecided", look.warn], ["worse", look.bad], ["no verdict", look.soft],
    ].filter(([, color]) => colors.includes(color));
    return {
      height: 58 + 24 * arms.length, data,
      keys: [
        { name: "one seed", color: lineStyle(0, look.theme).color, mark: "ring" },
        { name: "mean ± sd:", color: look.ink, mark: "tick" }, ...verdicts.map(([name, color]) => ({ name, color, mark: "tick" })),
      ],
      layout: layout(
        look,
        {
          hovermode: "closest", shapes, annotations: lost(arms, look), uirevision: `study ${Boolean(range)}`, margin: { l: 48, r: 16, t: 4, b: 40 },
          xaxis: {
            title: { text: safe(study.metric) }, tickformat: ".5~g", ...(range ? { range: [range.low, range.high] } : {}),
          },
          yaxis: {
            tickvals: arms.map((_, index) => index), ticktext: arms.map((arm) => safe(clip(arm.name, look.narrow ? 18 : look.width > 800 ? 60 : 44))),
            range: [arms.length - 0.4, -0.6], fixedrange: true, tickfont: { size: 11 },
          },
        },
      ),
    };
  }

  const miniBanner = (source) => ({
    key: `mini ${source.id}`, sign: source.name,
    make: () => node(
      "p", { class: "banner", role: "note" },
      node("strong", {}, "A trial run of the study: its numbers mean nothing. "),
      `${source.name} was run with --mini, which only tests every arm's options on a few steps of small data.`,
    ),
  });

  function study(sources) {
    const items = [];
    for (const source of sources) {
      const found = source.study;
      if (!found || source.learning) continue; // learning.js shows its arms
      const title = found.name || source.name,
        tones = { better: "good", equal: "good", "no worse": "good", worse: "bad", undecided: "warn" };
      if (found.mini && sources.length > 1) items.push(miniBanner(source)); // a page about this study alone begins with it
      if (found.about || found.note) {
        items.push({
          key: `about ${source.id}`, sign: [found.about, found.note],
          make: () => node("p", { class: "text" }, [found.about, found.note].filter(Boolean).join(" ")),
        });
      }
      const ended = found.arms.filter((arm) => arm.values.length);
      if (ended.length) {
        const key = `chart ${source.id}`, near = armsRange(found), range = state.all.has(key) ? null : near;
        const far = ended.filter((arm) => isFar(arm, range)).length;
        items.push(chart({
          key, title: `${title}: ${found.metric} by arm`,
          hint: [
            `band: ${found.reference} ± ${plain(found.margin)}, which counts as equal`,
            far ? `arrows: ${far === 1 ? "an arm" : `${far} arms`} outside the axis` : "",
          ].filter(Boolean).join("; "),
          wide: true, tools: near ? [allTool(key)] : [],
          height: 58 + 24 * found.arms.length, figure: (plot) => studyFigure(found, { ...plot, range }),
          label: () => `Chart: ${found.metric} by arm. ${ended.map((arm) => `${arm.name} ${arm.spread}`).join("; ")}.`,
        }));
      }
      items.push({ key: `table ${source.id}`, sign: found, make: () => {
        const timed = found.target !== null, grows = found.arms.some((arm) => arm.batch),
          head = [
            "arm", "verdict", `${found.metric}, mean ± sd (n)`, `difference from ${found.reference}`, "failed",
            ...(timed ? [`median time to ${found.target}`] : []), "global batch", ...(grows ? ["steps"] : []), "V", "peak lr",
          ];
        const verdict = (arm) => node(
          "span", {}, node("span", { class: `badge ${tones[arm.verdict] || ""}` }, arm.verdict),
          arm.why ? node("small", { class: "soft" }, arm.why) : "",
        );
        const typical = (arm) => (isNumber(arm.time_to_target_s) ? time(arm.time_to_target_s) : "–");
        const reached = (arm) => `${typical(arm)} (${arm.reached} of ${arm.runs})`;
        const rows = found.arms.map((arm) => [
          arm.name, verdict(arm), arm.spread, arm.difference || "–", String(arm.failed), ...(timed ? [reached(arm)] : []),
          arm.batch || plain(arm.global_batch), ...(grows ? [arm.steps] : []), plain(arm.virtual_workers), plain(arm.peak_lr),
        ]);
        const box = table({ head, rows, numbers: 2, caption: `${title}: arms and verdicts` });
        box.querySelectorAll("tbody tr > :nth-child(2)").forEach((cell) => cell.classList.add("verdict-cell"));
        box.querySelectorAll("thead th").forEach((cell) => cell.classList.add("wrapped"));
        box.querySelectorAll("tbody th").forEach((cell) => cell.classList.add("long"));
        return node("div", { class: "card" }, box, node("p", { class: "text soft" }, found.legend));
      } });
    }
    return items;
  }

  window.Paceline.sections.study = { title: "Study", make: study };
  Object.assign(window.Paceline, { miniBanner });
})();
