// The loss surface around a model.
"use strict";
(() => {
  const { visible, isNumber, plain, chart, layout } = window.Paceline;

  function landscapeFigure(landscape, context) {
    const { look } = context, all = landscape.loss.flat().filter((value) => isNumber(value) && value > 0);
    const least = all.reduce((a, b) => Math.min(a, b), Infinity), most = all.reduce((a, b) => Math.max(a, b), 0),
      log = most / least > 30;
    const z = landscape.loss.map((row) => row.map((value) => (log ? (value > 0 ? Math.log10(value) : null) : value)));
    const ends = log ? [Math.log10(least), Math.log10(most)] : null;
    const ticks = log ? Array.from({ length: 6 }, (_, index) => ends[0] + ((ends[1] - ends[0]) * index) / 5) : undefined;
    return {
      height: Math.min(520, 0.8 * look.width + 60), width: 640,
      data: [
        {
          type: "contour", x: landscape.x, y: landscape.y, z, colorscale: "Viridis", ncontours: 24,
          line: { width: 0.5, color: "rgba(255,255,255,.35)" },
          colorbar: {
            title: { text: log ? "loss (log)" : "loss", font: { color: look.soft } }, thickness: 12, outlinewidth: 0,
            tickvals: ticks, ticktext: ticks && ticks.map((tick) => plain(+(10 ** tick).toPrecision(2))),
            tickfont: { color: look.ink },
          },
          customdata: landscape.loss, hovertemplate: "x %{x:.3~g}, y %{y:.3~g}: loss %{customdata:.4~g}<extra></extra>",
        },
      ],
      layout: layout(
        look,
        {
          hovermode: "closest", uirevision: "landscape", xaxis: { title: { text: "first direction" }, constrain: "domain" },
          yaxis: { title: { text: "second direction" }, scaleanchor: "x", constrain: "domain" },
        },
      ),
    };
  }

  function landscape(sources) {
    return visible(sources).filter((source) => source.landscape).map((source) => chart({
      key: `landscape ${source.id}`, title: sources.length > 1 ? source.name : "Loss around the model",
      hint: source.landscape.about, wide: visible(sources).filter((each) => each.landscape).length === 1, height: 460,
      figure: (plot) => landscapeFigure(source.landscape, plot),
      label: () => `Chart: contours of the loss. ${source.landscape.about}`,
    }));
  }

  window.Paceline.sections.landscape = { title: "Loss surface", grid: true, make: landscape };
})();
