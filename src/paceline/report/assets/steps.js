// Where a step's time went: its components, for each run or worker count, and over the course of one run.
"use strict";
(() => {
  const {
    state, visible, trains, safe, uid, clip, isNumber, seconds, bytes, commas, node, chart, layout, keysOf, column, xAxis,
  } = window.Paceline;

  const COMPONENTS = {
    light: {
      input: "#00845f", compute: "#0072b2", communication: "#e69f00", waiting: "#d55e00", optimizer: "#b0458a", other: "#8b93a1",
    },
    dark: {
      input: "#2fcb9c", compute: "#56b4e9", communication: "#f0c04a", waiting: "#ff8a4c", optimizer: "#e58fc2", other: "#8b95a5",
    },
  };

  const colorOf = (component, look) => COMPONENTS[look.theme][component] || COMPONENTS[look.theme].other;
  const PREFIX = "components_s."; // of the columns of a health row
  const componentOf = (column) => column.slice(PREFIX.length);

  // The components that took any time, in their usual order.
  const namesOf = (bars) => [...new Set(bars.flatMap((bar) => Object.keys(bar.components)))]
    .filter((name) => bars.some((bar) => bar.components[name] > 0));

  // bars: [{label, components: {input: seconds, ...}, memory: bytes}], drawn top to bottom.
  function componentsFigure(bars, context) {
    const { look } = context, names = namesOf(bars);
    const totals = bars.map((bar) => Object.values(bar.components).reduce((a, b) => a + b, 0));
    const data = names.map((name) => ({
      type: "bar", orientation: "h", name: safe(name), meta: name, uid: uid(name), y: bars.map((_, index) => index),
      x: bars.map((bar, index) => (bar.components[name] || 0) * (state.share ? 100 / totals[index] : 1e3)),
      marker: { color: colorOf(name, look), line: { color: look.card, width: 1 } },
      text: bars.map((bar, index) => (
        (bar.components[name] || 0) / totals[index] >= (look.narrow ? 0.14 : 0.06)
          ? `${Math.round((100 * bar.components[name]) / totals[index])}%` : ""
      )),
      textposition: "inside", insidetextanchor: "middle", textangle: 0,
      insidetextfont: {
        color: look.theme === "dark" ? "#10141a" : name === "communication" || name === "other" ? "#1a1e26" : "#ffffff",
      },
      customdata: bars.map(
        (bar, index) => `${seconds(bar.components[name] || 0)} (${Math.round((100 * (bar.components[name] || 0)) / totals[index])}%)`
      ),
      hovertemplate: `${safe(name)}: %{customdata}<extra></extra>`,
    }));
    const height = 58 + 40 * bars.length;
    return {
      height, data, keys: keysOf(data),
      layout: layout(look, {
        barmode: "stack", bargap: 0.28, hovermode: "closest", uirevision: `components ${state.share}`, dragmode: false,
        xaxis: { title: { text: UNIT() }, fixedrange: true, tickformat: ",.6~g", ...(state.share ? { range: [0, 100] } : {}) },
        yaxis: {
          tickvals: bars.map((_, index) => index),
          ticktext: bars.map((bar) => safe(bars.length > 1 ? clip(bar.label, look.narrow ? 16 : 44) : "")), autorange: "reversed",
          fixedrange: true, showgrid: false,
        },
      }),
    };
  }

  const UNIT = () => (state.share ? "% of a step" : "ms per step");

  // The button that switches all charts of components between times and shares.
  const shareTool = (key) => ({
    sign: state.share,
    make: () => node(
      "button",
      {
        type: "button", class: "button", "aria-pressed": String(state.share), "data-focus": `${key} share`,
        onclick: () => { state.share = !state.share; window.Paceline.redraw(); },
      },
      state.share ? "Show ms" : "Show %",
    ),
  });

  function componentsTable(bars) {
    const names = namesOf(bars), sized = bars.some((bar) => isNumber(bar.memory));
    const whole = (bar) => Object.values(bar.components).reduce((a, b) => a + b, 0);
    const said = (bar, value) => (state.share ? `${((100 * value) / whole(bar)).toFixed(1)}%` : seconds(value));
    return {
      head: ["", ...names, "step", ...(sized ? ["memory"] : [])],
      rows: bars.map((bar) => [
        bar.label, ...names.map((name) => (isNumber(bar.components[name]) ? said(bar, bar.components[name]) : "–")),
        seconds(whole(bar)), ...(sized ? [isNumber(bar.memory) ? bytes(bar.memory) : "–"] : []),
      ]),
      numbers: 1,
    };
  }

  // How the components of a step changed during a run. A health row stands for the steps since the row before it.
  function healthFigure(source, context) {
    const { look, x } = context, health = source.series.health,
      names = Object.keys(health).filter((name) => name.startsWith(PREFIX) && health[name].some((s) => s > 0));
    const axis = xAxis([source], x), at = column(source, "health", x) || [];
    const kept = at.map((_, index) => index).filter((index) => isNumber(at[index]) && (index === 0 || at[index] > at[index - 1]));
    const xs = [0, ...kept.map((index) => at[index] / axis.by)];
    const whole = (index) => names.reduce((sum, name) => sum + (health[name][index] || 0), 0) || 1;
    const by = (index) => (state.share ? 100 / whole(index) : 1e3);
    return {
      data: names.map((name) => {
        const component = componentOf(name), ys = kept.map((index) => (health[name][index] || 0) * by(index)),
          color = colorOf(component, look);
        return {
          type: "scatter", mode: "lines", stackgroup: "components", name: safe(component), uid: uid(name), x: xs, y: [ys[0], ...ys],
          line: { shape: "vh", width: 0, color }, fillcolor: color, hovertemplate: `${safe(component)}: %{y:.3~g}${state.share ? "%" : " ms"}<extra></extra>`,
        };
      }),
      keys: names.map(
        (name) => ({ name: componentOf(name), color: colorOf(componentOf(name), look), mark: "box" })
      ),
      layout: layout(
        look,
        {
          hovermode: "x unified", uirevision: `health ${x} ${state.share}`,
          xaxis: {
            title: { text: axis.title }, hoverformat: ",.5~g", tickformat: x === "time_s" ? "" : ",.10~g",
            unifiedhovertitle: { text: `up to ${axis.title} %{x:,.4~r}` },
          },
          yaxis: { title: { text: UNIT() }, tickformat: ",.6~g", ...(state.share ? { range: [0, 100] } : {}) },
        },
      ),
    };
  }

  function step(sources) {
    const items = [], runs = trains(visible(sources)).filter((source) => source.where);
    const scales = sources.filter((source) => source.scale),
      bars = runs.map((source) => ({
        label: source.name, components: source.where.components_s, memory: source.last.memory_bytes,
      }));
    for (const source of scales) {
      bars.push(...source.scale.counts.filter((row) => Object.keys(row.components_s).length).map((row) => ({
        label: `${commas(row.workers)} worker${row.workers === 1 ? "" : "s"}${scales.length > 1 ? ", " + source.name : ""}`,
        components: row.components_s,
      })));
    }
    if (!bars.length) return items;
    const about = runs.map((source) => health(source, runs.length === 1)).filter(Boolean);
    if (about.length) {
      items.push(
        { key: "about", sign: about, make: () => node("ul", { class: "list text" }, ...about.map((text) => node("li", {}, text))) }
      );
    }
    const biggest = (bar) => Object.entries(bar.components).sort((a, b) => b[1] - a[1])[0];
    const mostly = (bar) => `${bar.label}: mostly ${biggest(bar)[0]}, ${seconds(biggest(bar)[1])}`;
    items.push(chart({
      key: "components", title: "Components of a step",
      hint: "means over steps and busy workers; communication is only what the backward pass does not hide", wide: true,
      height: 58 + 40 * bars.length, figure: (plot) => componentsFigure(bars, plot), tools: [shareTool("components")],
      label: () => `Chart: the components of a step. ${bars.map(mostly).join("; ")}.`, rows: () => componentsTable(bars),
    }));
    for (const source of runs.length === 1 ? runs : []) {
      if (source.where.rows > 2) {
        items.push(chart({
          key: `health ${source.id}`, title: "Components of a step during the run", wide: true, height: 280,
          figure: (plot) => healthFigure(source, plot), tools: [shareTool("health")],
          label: () => `Chart: the components of a step of ${source.name} over its ${source.where.rows} health rows.`,
        }));
      }
    }
    return items;
  }

  // What else health says about a run. The memory of several runs is only in the table, or it would be a list of numbers.
  function health(source, alone) {
    const { slowest, lag_s } = source.where, said = [];
    const behind = isNumber(lag_s) ? `, which was ${seconds(lag_s)} behind the median worker` : "";
    if (isNumber(slowest)) said.push(`the other workers mostly waited for worker ${slowest}${behind}`);
    const whose = source.facts.workers === 1 ? "" : " in the worker that uses most";
    if (alone && isNumber(source.last.memory_bytes)) said.push(`${bytes(source.last.memory_bytes)} of memory${whose}`);
    return said.length ? `${source.name}: ${said.join("; ")}.` : "";
  }

  window.Paceline.sections.step = { title: "Where a step's time went", make: step };
})();
