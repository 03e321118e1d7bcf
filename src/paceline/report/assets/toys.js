// Toys: paths of optimizers on two-parameter surfaces, animated, as contours or in 3-D; and how many walks leave a sharp minimum.
"use strict";
(() => {
  const { visible, theme, lineStyle, safe, uid, isNumber, plain, commas, node, chart, layout } = window.Paceline;

  const WHOLE_S = 12; // seconds that an animation takes at normal speed
  const TAIL = 25; // the newest points of a path, which are drawn bolder
  const SPEEDS = [0.25, 0.5, 1, 2, 4];
  const FRAME_MS = 33; // plotly takes 10 to 40 ms to draw one
  const SCALES = { // of contour lines, and of the surface in 3-D, from low to high
    light: [["#3f6f9f", "#c3ccd8"], ["#f3f6fa", "#a9b8ca"]], dark: [["#6ea3d8", "#38424f"], ["#161b22", "#52637a"]],
  };
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const players = new Map(); // a card's key -> what the user selected, and where the animation is

  const lengthOf = (toy) => Math.max(1, ...toy.paths.map((path) => path.t.at(-1)));

  function playerOf(key, toy) {
    if (!players.has(key)) players.set(key, { at: still.matches ? lengthOf(toy) : 0, playing: false, begun: still.matches, speed: 1, solid: false });
    return players.get(key);
  }

  // ---- the picture ----------------------------------------------------------------------------------------------
  const lift = (toy, value) => (!isNumber(value) ? null : toy.log ? (value > 0 ? Math.log10(value) : null) : Math.min(value, toy.most ?? value));

  const ends = (values) => values.reduce(([low, high], value) => (value === null ? [low, high] : [Math.min(low, value), Math.max(high, value)]), [Infinity, -Infinity]);

  // The part of a path up to a time: its trail, the newest points of it, and its head.
  function until(toy, path, at, above) {
    const count = Math.max(1, path.t.findLastIndex((t) => t <= at) + 1);
    const z = path.z.slice(0, count).map((value) => (lift(toy, value) ?? 0) + above);
    return [count, TAIL, 1].map((last) => {
      const from = Math.max(0, count - last);
      return { x: path.x.slice(from, count), y: path.y.slice(from, count), z: z.slice(from) };
    });
  }

  const aboveOf = (toy) => { // paths are drawn a little above the surface
    const [low, high] = ends(toy.z.flat().map((value) => lift(toy, value)));
    return 0.035 * (high - low || 1);
  };

  const PARTS = ["trail", "tail", "head"]; // the traces of a path; the surface is before them, the stationary points after them
  const moving = (toy) => toy.paths.flatMap((_, place) => PARTS.map((_, part) => 1 + PARTS.length * place + part));
  const frame = (toy, at) => toy.paths.flatMap((path) => until(toy, path, at, aboveOf(toy)));
  const pathColor = (place) => lineStyle(place, theme()).color;

  function traces(toy, at, solid, look) {
    const flat = ({ x, y, z }) => (solid ? { type: "scatter3d", x, y, z } : { type: "scatter", x, y });
    const above = aboveOf(toy), parts = frame(toy, at), marks = toy.points;
    return [
      surface(toy, solid, look),
      ...parts.map((part, index) => {
        const place = Math.floor(index / PARTS.length), kind = PARTS[index % PARTS.length], color = pathColor(place);
        return {
          ...flat(part), uid: `${uid(kind, String(place))}-${solid}`, name: safe(toy.paths[place].name), hoverinfo: "skip",
          ...(kind === "head"
            ? { mode: "markers", marker: { color, size: solid ? 6 : 12, line: { color: look.card, width: solid ? 0 : 2 } } }
            : { mode: "lines", opacity: kind === "tail" ? 1 : 0.35, line: { color, width: (kind === "tail" ? 2 : 1.2) * (solid ? 1.6 : 1) } }),
        };
      }),
      {
        ...flat({ x: marks.map(({ x }) => x), y: marks.map(({ y }) => y), z: marks.map(({ value }) => (lift(toy, value) ?? 0) + above) }),
        uid: `points-${solid}`, mode: "markers+text", text: marks.map(({ name }) => safe(name)),
        textposition: marks.map((point) => (isMinimum(point) ? "bottom center" : "top center")), textfont: { color: look.ink, size: 11 },
        marker: { symbol: "cross", size: solid ? 4 : 9, color: look.ink }, hovertext: marks.map((point) => safe(describe(point))), hoverinfo: "text",
      },
    ];
  }

  const isMinimum = ({ eigenvalues }) => eigenvalues.every((value) => value > 0);
  const describe = ({ name, value, eigenvalues }) => `${name}: loss ${plain(value)}, eigenvalues ${eigenvalues.map(plain).join(" and ")}`;

  function surface(toy, solid, look) {
    const z = toy.z.map((row) => row.map((value) => lift(toy, value))), [low, high] = SCALES[look.theme][Number(solid)];
    const shared = { x: toy.x, y: toy.y, z, colorscale: [[0, low], [1, high]], showscale: false, uid: `${toy.toy}-${solid}` };
    if (solid) {
      return {
        ...shared, type: "surface", hoverinfo: "skip", lighting: { ambient: 0.75, diffuse: 0.5, specular: 0.05 },
        contours: { z: { show: true, usecolormap: false, color: look.soft, width: 1 } },
      };
    }
    return { // lines without areas between them: they are drawn three times as fast
      ...shared, type: "contour", ncontours: 24, contours: { coloring: "lines" }, line: { width: 1.2 }, customdata: toy.z,
      hovertemplate: `${safe(toy.axes[0])} %{x:.3~g}, ${safe(toy.axes[1])} %{y:.3~g}: loss %{customdata:.4~g}<extra></extra>`,
    };
  }

  function figure(toy, { look }, player) {
    const range = ([low, high]) => [low, high], [x, y] = [range(ends(toy.x)), range(ends(toy.y))], solid = player.solid;
    const title = (place) => ({ title: { text: safe(toy.axes[place]) } });
    const axis = { color: look.ink, gridcolor: look.line, backgroundcolor: "rgba(0,0,0,0)", showspikes: false };
    const extra = solid
      ? {
        scene: {
          xaxis: { ...axis, ...title(0), range: x }, yaxis: { ...axis, ...title(1), range: y },
          zaxis: { ...axis, title: { text: toy.log ? "log10 of the loss" : "loss" } }, aspectmode: "manual", aspectratio: { x: 1.25, y: 1, z: 0.6 },
          camera: { eye: { x: 1.25, y: -1.05, z: 1.5 }, center: { x: 0, y: 0, z: -0.2 } }, dragmode: "turntable", uirevision: "3-D",
        },
        margin: { l: 0, r: 0, t: 0, b: 0 }, uirevision: "3-D",
      }
      : { hovermode: "closest", uirevision: "2-D", xaxis: { ...title(0), range: x }, yaxis: { ...title(1), range: y } };
    return {
      height: Math.max(320, Math.min(470, 0.85 * look.width)), data: traces(toy, player.at, solid, look), layout: layout(look, extra),
      keys: toy.paths.map((path, place) => ({ name: path.name, color: pathColor(place), mark: "line" })),
    };
  }

  // ---- playing --------------------------------------------------------------------------------------------------
  // Move the points and their trails; the surface is not drawn again.
  function show(card) {
    const { toy, player, inner: { plot } } = card;
    card.controls(player);
    if (!plot.data || !plot.isConnected) return Promise.resolve();
    const data = frame(toy, player.at), places = moving(toy);
    const names = player.solid ? ["x", "y", "z"] : ["x", "y"];
    return window.Plotly.restyle(plot, Object.fromEntries(names.map((name) => [name, data.map((part) => part[name])])), places);
  }

  // One animation at a time: a page with several of them stays quick.
  let current = null;

  function play(card) {
    if (current && current !== card) pause(current);
    current = card;
    const { player } = card;
    if (player.at >= lengthOf(card.toy)) player.at = 0;
    [player.playing, player.begun] = [true, true];
    card.controls(player);
    const turn = (before, drawn) => requestAnimationFrame((now) => {
      if (!player.playing || !card.isConnected || current !== card) return;
      const whole = lengthOf(card.toy), passed = Math.min(250, now - (before ?? now)) / 1000; // not the time in the background
      player.at = Math.min(whole, player.at + (passed * player.speed * whole) / WHOLE_S);
      if (player.at >= whole) return end(card);
      if (now - drawn < FRAME_MS) return turn(now, drawn);
      show(card).then(() => turn(now, now));
    });
    turn(null, 0);
  }

  function pause(card) {
    [card.player.playing, card.player.begun] = [false, true];
    if (current === card) current = null;
    return show(card);
  }

  const end = (card) => pause(card).then(playNext);

  // Once each, pictures play by themselves when at least half of them is in view; never if the user asked the system for less motion.
  const inView = new Set();

  function playNext() {
    const next = [...inView].find((card) => card.isConnected && !card.player.begun);
    if (next && !current && !still.matches) play(next);
  }

  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) inView[isIntersecting ? "add" : "delete"](target.closest("article"));
    playNext();
  }, { threshold: 0.5 });

  const hasWebGl = () => { try { return Boolean(document.createElement("canvas").getContext("webgl")); } catch { return false; } };

  function makeControls(card, title) {
    const button = node("button", { type: "button", class: "button play", onclick: () => (card.player.playing ? pause(card) : play(card)) });
    const slider = node("input", { type: "range", min: "0", "aria-label": `Time in the animation: ${title}` });
    const said = node("output", {});
    const speed = node("select", { class: "button", "aria-label": "Speed" }, ...SPEEDS.map((each) => node("option", { value: each, selected: each === 1 }, `${each}×`)));
    const solid = node("button", { type: "button", class: "button solid", "aria-pressed": "false" }, "3-D");
    solid.disabled = !hasWebGl();
    if (solid.disabled) solid.title = "3-D needs WebGL, which this browser does not offer";
    slider.addEventListener("input", () => {
      card.player.at = Number(slider.value);
      pause(card);
    });
    speed.addEventListener("change", () => (card.player.speed = Number(speed.value)));
    solid.addEventListener("click", () => {
      card.player.solid = !card.player.solid;
      card.inner.reset.hidden = true;
      card.controls(card.player);
      if (card.inner.plot.again) card.inner.plot.again();
    });
    card.controls = (player) => {
      const whole = lengthOf(card.toy), at = Math.round(player.at), words = `${commas(at)} of ${commas(whole)} ${card.toy.clock}`;
      const name = player.playing ? "Pause" : at >= whole ? "Play again" : "Play";
      if (button.textContent !== name) button.textContent = name;
      [slider.max, slider.step, slider.value] = [whole, Math.max(1, Math.round(whole / 200)), at];
      slider.setAttribute("aria-valuetext", words);
      said.textContent = words;
      speed.value = String(player.speed);
      solid.setAttribute("aria-pressed", String(player.solid));
    };
    return node("div", { class: "player", role: "group", "aria-label": `Animation: ${title}` }, button, slider, speed, solid, said);
  }

  function animation(source, toy, wide, owner) {
    const key = `toy ${source.id} ${toy.toy}`, player = playerOf(key, toy), title = owner + (toy.title || toy.toy);
    const item = chart({
      key, title, hint: toy.about, wide, height: 400, figure: (context) => figure(toy, context, player),
      label: () => `Chart: ${title}. Paths: ${toy.paths.map((path) => path.name).join(", ")}. ${toy.points.map(describe).join("; ")}`,
      rows: () => TABLES[toy.toy](toy),
    });
    return {
      ...item,
      make: () => {
        const card = item.make();
        card.inner.plot.after(makeControls(card, title));
        watch.observe(card.inner.plot);
        return card;
      },
      update: (card) => {
        [card.toy, card.player] = [toy, player];
        player.at = Math.min(player.at, lengthOf(toy));
        card.controls(player);
        item.update(card);
      },
    };
  }

  const fraction = (value) => value.toFixed(3);
  const TABLES = {
    line: ({ rows }) => ({
      head: ["batch", "steps", "distance from the minimum", "standard deviation", "loss above the minimum"], numbers: 0,
      rows: rows.map((row) => [commas(row.batch), commas(row.steps), plain(row.distance), plain(row.sd), plain(row.excess)]),
    }),
    threshold: ({ rows }) => ({
      head: ["learning rate / limit", "descent without noise", "learning rate", "least x in the last 64 steps", "largest"], numbers: 2,
      rows: rows.map((row) => [String(row.factor), row.end, plain(row.lr), row.x_low.toFixed(4), row.x_high.toFixed(4)]),
    }),
    minima: ({ points }) => ({
      head: ["point", "x", "y", "loss", "eigenvalues", ""], numbers: 1,
      rows: points.map((point) => [point.name, ...[point.x, point.y, point.value, ...point.eigenvalues].map(plain)]),
    }),
  };

  // ---- who leaves the sharp minimum ----------------------------------------------------------------------------
  function escapesFigure(rows, limit, { look }) {
    const names = [...new Set(rows.map((row) => row.optimizer))];
    const data = names.map((name, place) => {
      const own = rows.filter((row) => row.optimizer === name), color = pathColor(place);
      return {
        type: "scatter", mode: "lines+markers", uid: uid("escapes", String(place)), x: own.map((row) => row.row_lr), y: own.map((row) => row.flat),
        line: { color, width: 2 }, marker: { color, size: 7 }, name: safe(name),
        error_y: { type: "data", array: own.map((row) => row.high - row.flat), arrayminus: own.map((row) => row.flat - row.low), color, thickness: 1.4 },
        customdata: own.map((row) => [fraction(row.low), fraction(row.high), plain(row.lr)]),
        hovertemplate: `${safe(name)}, lr %{customdata[2]}: %{y:.3f} (%{customdata[0]} to %{customdata[1]})<extra></extra>`,
      };
    });
    const at = [...new Set(rows.map((row) => row.row_lr))];
    const line = isNumber(limit)
      ? [{ type: "line", x0: limit, x1: limit, yref: "paper", y0: 0, y1: 1, line: { color: look.soft, width: 1, dash: "dash" } }] : [];
    return {
      data, keys: [
        ...names.map((name, place) => ({ name, color: pathColor(place), mark: "line" })),
        ...(line.length ? [{ name: "2/λ of the sharp minimum", color: look.soft, mark: "dash" }] : []),
      ],
      layout: layout(look, {
        hovermode: "closest", uirevision: "escapes", shapes: line,
        xaxis: { title: { text: "learning rate of SGD" }, type: "log", tickmode: "array", tickvals: at, ticktext: at.map(plain) },
        yaxis: { title: { text: "end in the flat minimum" }, range: [-0.04, 1.06] },
      }),
    };
  }

  function escapes(source, toy, owner) {
    const noises = [...new Set(toy.rows.map((row) => row.noise))], sharp = toy.points.find(isMinimum);
    return noises.map((noise) => {
      const rows = toy.rows.filter((row) => row.noise === noise);
      return chart({
        key: `escapes ${source.id} ${noise}`, title: `${owner}Who leaves the sharp minimum: noise ${plain(noise)}`,
        hint: `${commas(rows[0].seeds)} walks per point, 95% intervals; long run ${fraction(rows[0].long_run)}`,
        figure: (context) => escapesFigure(rows, sharp && 2 / sharp.eigenvalues[0], context),
        label: () => `Chart: fraction of walks that end in the flat minimum, with noise ${noise}, by learning rate`,
        rows: () => ({
          head: ["optimizer", "learning rate of SGD", "its learning rate", "effective", "in the flat minimum", "95% interval", "diverged"], numbers: 1,
          rows: rows.map((row) => [
            row.optimizer || "–", plain(row.row_lr), plain(row.lr), plain(row.effective_lr), fraction(row.flat),
            `${fraction(row.low)} to ${fraction(row.high)}`, commas(row.diverged),
          ]),
        }),
      });
    });
  }

  function toys(sources) {
    const found = visible(sources).flatMap((source) => (source.toys || []).map((toy) => [source, toy]));
    const owner = (source) => (sources.length > 1 ? `${source.name}: ` : "");
    return [
      ...found.map(([source, toy]) => animation(source, toy, found.length === 1, owner(source))),
      ...found.filter(([, toy]) => toy.toy === "minima").flatMap(([source, toy]) => escapes(source, toy, owner(source))),
    ];
  }

  window.Paceline.sections.toys = { title: "Toys", grid: true, make: toys };
})();
