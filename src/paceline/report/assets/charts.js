// Cards with a chart: drawn by plotly in the page's colors when they scroll into view, with zoom and the numbers as a table.
"use strict";
(() => {
  const { state, theme, colorPlace, node, table } = window.Paceline;

  // A card. Its figure is drawn at every redraw, its table when it is opened.
  // figure: (context) => ({ data, layout, keys, height }) for plotly; label: () => text for screen readers; rows: () => a table;
  // tools: buttons in its header. A figure in 3-D has a `camera`: where it is seen from after "Reset zoom".
  function chart({ key, title, hint = "", wide, height = 290, figure, label, rows, tools = [] }) {
    return {
      key, sign: [title, hint, wide, tools.map((tool) => tool.sign)],
      make: () => {
        const reset = node(
          "button",
          { type: "button", class: "button", hidden: "hidden", "data-focus": `${key} reset`, onclick: () => zoomOut(plot) },
          "Reset zoom",
        );
        const plot = node("div", { class: "plot", role: "img" });
        const keys = node("ul", { class: "keys", "aria-hidden": "true" });
        const details = node("details", {}, node("summary", { "data-focus": `${key} table` }, "Numbers as a table"));
        const card = node(
          "article", { class: wide ? "card wide" : "card" },
          node(
            "header", {}, node("h3", {}, title), hint ? node("span", { class: "hint" }, hint) : null,
            node("div", { class: "tools" }, ...tools.map((tool) => tool.make()), reset),
          ),
          keys, plot, rows ? details : null,
        );
        details.addEventListener("toggle", () => card.fill && card.fill());
        plot.style.minHeight = `${height}px`;
        card.inner = { plot, reset, details, keys };
        return card;
      },
      update: (card) => {
        const { plot, details } = card.inner;
        card.fill = () => {
          if (details.open && rows) {
            const made = table({ ...rows(), tall: true, caption: `${title}: numbers` });
            details.lastElementChild.tagName === "DIV" ? details.lastElementChild.replaceWith(made) : details.append(made);
          }
        };
        card.fill();
        plot.setAttribute("aria-label", label());
        soon(card.inner, () => draw(card.inner, figure, height));
      },
    };
  }

  // Charts in view are drawn at once, the others one by one when the browser is idle: a page of thirty charts opens as fast as one
  // of three, and a live run redraws what the user is looking at.
  const late = new Map();
  let waiting = false;

  function soon(card, job) {
    late.set(card, job);
    if (inView(card)) drawLate(card);
    else next();
  }

  function next() {
    if (waiting || !late.size) return;
    waiting = true;
    setTimeout(() => {
      waiting = false;
      drawLate([...late.keys()].find(inView) || late.keys().next().value);
      next();
    }, 0);
  }

  function drawLate(card) {
    const job = late.get(card);
    late.delete(card);
    if (job && card.plot.isConnected) job();
  }

  function inView({ plot }) {
    const { top, bottom } = plot.getBoundingClientRect();
    return top < innerHeight + 200 && bottom > -200;
  }

  addEventListener("beforeprint", () => [...late.keys()].forEach(drawLate));

  function draw(card, figure, height) {
    if (!window.Plotly) return;
    const { plot, reset, keys } = card;
    const made = figure(context(plot)), tall = made.height || height;
    plot.style.minHeight = `${tall}px`;
    plot.style.maxWidth = made.width ? `${made.width}px` : "";
    const layout = { ...made.layout, height: tall, width: plot.clientWidth || undefined, autosize: false };
    keys.replaceChildren(...(made.keys || []).map(({ name, color, mark }) => {
      const sample = node("i", { class: mark });
      sample.style.color = color;
      return node("li", {}, sample, name);
    }));
    plot.drawnFor = plot.clientWidth;
    const first = !plot.data;
    plot.home = Object.fromEntries(AXES.map((name) => [name, layout[name].range && [...layout[name].range]]));
    plot.home.camera = made.camera;
    window.Plotly.react(
      plot, made.data, layout,
      { displayModeBar: false, responsive: false, doubleClick: "reset", scrollZoom: false, showTips: false },
    );
    plot.again = () => soon(card, () => draw(card, figure, height));
    reset.hidden = !zoomed(plot);
    if (!first) return;
    plot.on(
      "plotly_relayout",
      (change) => { if (Object.keys(change).some((name) => /axis|camera/.test(name))) reset.hidden = !zoomed(plot); },
    );
    watch.observe(plot);
  }

  const AXES = ["xaxis", "yaxis"];
  const zoomed = (plot) => (
    plot.home.camera
      ? JSON.stringify(plot.home.camera.eye) !== JSON.stringify(plot.layout.scene.camera.eye)
      : AXES.some((name) => (
        plot.home[name] ? String(plot.home[name]) !== String(plot.layout[name].range) : plot.layout[name].autorange === false
      ))
  );
  const zoomOut = (plot) => window.Plotly.relayout(
    plot,
    plot.home.camera ? { "scene.camera": plot.home.camera } : Object.fromEntries(
      AXES.map((name) => (plot.home[name] ? [`${name}.range`, [...plot.home[name]]] : [`${name}.autorange`, true]))
    ),
  );

  const watch = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target.data && Math.abs(target.clientWidth - target.drawnFor) > 1 && target.clientWidth) {
        requestAnimationFrame(() => target.again());
      }
    }
  });

  function context(plot) {
    const css = getComputedStyle(document.documentElement), get = (name) => css.getPropertyValue(name).trim(),
      width = plot ? plot.clientWidth : 600;
    const look = {
      theme: theme(), ink: get("--ink"), soft: get("--soft"), line: get("--line"), card: get("--card"),
      accentSoft: get("--accent-soft"), good: get("--good"), bad: get("--bad"), warn: get("--warn"),
      font: getComputedStyle(document.body).fontFamily, width, narrow: width < 480, touch: matchMedia("(pointer: coarse)").matches,
    };
    return { look, x: state.x, hidden: state.hidden, color: colorPlace, log: false };
  }

  function layout(look, extra) {
    const axis = {
      gridcolor: look.line, zeroline: false, linecolor: look.line, tickcolor: look.line, automargin: true, exponentformat: "power",
      title: { font: { size: 12, color: look.soft }, standoff: 8 },
    };
    const made = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 48, r: 12, t: 8, b: 40 }, showlegend: false,
      font: { family: look.font, size: 12, color: look.ink }, dragmode: look.touch ? false : "zoom",
      hoverlabel: {
        bgcolor: look.card, bordercolor: look.line, font: { color: look.ink, family: look.font, size: 12 }, align: "left",
        namelength: -1,
      },
      ...extra,
    };
    for (const name of ["xaxis", "yaxis"]) {
      const title = { ...axis.title, ...(extra[name] || {}).title };
      made[name] = { ...axis, ...extra[name], title };
    }
    return made;
  }

  const keysOf = (bars) => bars.map((trace) => ({ name: trace.meta, color: trace.marker.color, mark: "box" }));

  // The button of a chart whose axis leaves out values that are far from all others.
  const allTool = (key) => {
    const all = state.all.has(key);
    return {
      sign: all,
      make: () => node(
        "button",
        {
          type: "button", class: "button", "aria-pressed": String(all), "data-focus": `${key} all`,
          onclick: () => { all ? state.all.delete(key) : state.all.add(key); window.Paceline.redraw(); },
        },
        all ? "Hide far values" : "Show all values",
      ),
    };
  };

  Object.assign(window.Paceline, { chart, allTool, context, layout, keysOf });
})();
