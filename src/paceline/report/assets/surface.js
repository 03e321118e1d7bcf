// Surfaces: the loss over a plane as contours or in 3-D, with the model or the paths of training runs on it.
"use strict";
(() => {
  const { lineStyle, safe, uid, isNumber, plain, figure, layout } = window.Paceline;
  const homeOf = (narrow) => (
    { eye: narrow ? { x: 1.28, y: -1.6, z: 1.75 } : { x: 1.15, y: -1.43, z: 1.6 }, center: { x: 0, y: 0, z: -0.14 } }
  );
  const PIECES = 12; // of a path between two snapshots: each follows the surface

  // Whether the browser can draw in 3-D. Asked once: browsers allow few WebGL contexts.
  let webGL;
  function hasWebGL() {
    if (webGL === undefined) {
      const canvas = document.createElement("canvas"), gl = canvas.getContext("webgl2") || canvas.getContext("webgl");
      webGL = Boolean(gl);
      const lose = gl && gl.getExtension("WEBGL_lose_context");
      if (lose) lose.loseContext();
    }
    return webGL;
  }

  // How losses become heights and colors: their logarithms where the largest is more than 30 times the smallest.
  function scaleOf(losses) {
    let least = Infinity, most = -Infinity;
    for (const value of losses) if (isNumber(value)) { least = Math.min(least, value); most = Math.max(most, value); }
    const log = least > 0 && most / least > 30, at = (value) => (isNumber(value) ? (log ? Math.log10(value) : value) : null);
    const low = at(least), high = at(most) > low ? at(most) : low + 1;
    const size = (high - low) / 18; // a contour at the lowest or the highest loss itself would confuse plotly's filling
    const levels = { start: low + size / 2, end: high - size / 2, size };
    return { log, at, low, high, levels, ticks: log ? logTicks(least, most) : undefined };
  }

  // At most eight round losses between two.
  function logTicks(least, most) {
    const found = (mantissas) => {
      const all = [];
      for (let power = Math.floor(Math.log10(least)); power <= Math.log10(most); power++) {
        for (const mantissa of mantissas) all.push(Number(`${mantissa}e${power}`));
      }
      return all.filter((value) => value >= least && value <= most);
    };
    const kept = [[1, 2, 5], [1, 3], [1]].map(found).find((all) => all.length <= 8) || found([1]);
    return kept.filter((_, index) => index % Math.ceil(kept.length / 8) === 0);
  }

  const ticksOf = ({ ticks, at }) => (ticks ? { tickvals: ticks.map(at), ticktext: ticks.map(plain) } : {});

  const fewer = ({ ticks, ...scale }) => (
    { ...scale, ticks: ticks && ticks.filter((_, place) => ticks.length < 5 || place % 2 === 0) }
  );

  // The height of the surface at a point, between its four neighbors; null outside, and beside a gap.
  function heightAt({ x, y }, z, px, py) {
    const cell = (side, place) => {
      let index = 0;
      while (index < side.length - 2 && side[index + 1] < place) index++;
      const share = (place - side[index]) / (side[index + 1] - side[index] || 1);
      return share < -1e-6 || share > 1 + 1e-6 ? null : [index, Math.min(1, Math.max(0, share))];
    };
    const a = cell(x, px), b = cell(y, py);
    if (!a || !b) return null;
    let height = 0;
    for (const [row, weight] of [[b[0], 1 - b[1]], [b[0] + 1, b[1]]]) {
      for (const [column, share] of [[a[0], 1 - a[1]], [a[0] + 1, a[1]]]) {
        if (!weight || !share) continue;
        if (!z[row] || !isNumber(z[row][column])) return null;
        height += weight * share * z[row][column];
      }
    }
    return height;
  }

  // Points along a path, close enough that it stays on a curved surface.
  function finer({ x, y }) {
    const points = [];
    for (let index = 0; index + 1 < x.length; index++) {
      for (let piece = 0; piece < PIECES; piece++) {
        const share = piece / PIECES;
        points.push([x[index] + share * (x[index + 1] - x[index]), y[index] + share * (y[index + 1] - y[index])]);
      }
    }
    return [...points, [x.at(-1), y.at(-1)]];
  }

  const stepWords = (path) => path.x.map((_, index) => [
    path.name && `<b>${safe(path.name)}</b>`, isNumber(path.step[index]) && `step ${plain(path.step[index])}`,
    isNumber(path.loss[index]) && `loss ${figure(path.loss[index])}`,
    isNumber(path.off[index]) && `${plain(+path.off[index].toPrecision(3))} away from the plane`,
  ].filter(Boolean).join("<br>"));

  const pointWords = ({ x, y }, set) => set.loss.map((row, down) => row.map((loss, across) => {
    const accuracy = set.accuracy && set.accuracy[down][across];
    return [
      isNumber(loss) ? `loss ${figure(loss)}` : "", isNumber(accuracy) ? `accuracy ${figure(accuracy)}` : "",
      `at ${plain(+x[across].toPrecision(3))}, ${plain(+y[down].toPrecision(3))}`,
    ].filter(Boolean).join("<br>");
  }));

  // The marks on a surface: [{uid, points: [[x, y]], line, marker, hover}]. Below each path is a wider line in the card's color.
  // In 3-D (`solid`) there are no such lines, and markers have no edges.
  function marksOf(found, look, solid) {
    if (found.kind !== "path") {
      const marker = { size: 13, symbol: "circle", color: "#ffffff", line: { width: 3, color: "#1a1e26" } };
      const inside = [found.x, found.y].every((side) => side[0] <= 0 && side.at(-1) >= 0);
      return inside ? [{ uid: "model", points: [[0, 0]], marker, hover: ["the model"] }] : [];
    }
    return found.paths.flatMap((path, place) => {
      const { color } = lineStyle(place, look.theme), ids = (name) => uid(name, `${place}`), last = path.x.length - 1;
      const points = path.x.map((x, index) => [x, path.y[index]]), each = (first, others, end = others) => (
        points.map((_, index) => (index === last ? end : index === 0 ? first : others))
      );
      const lines = [
        { uid: ids("halo"), points: finer(path), line: { color: look.card, width: 6 } },
        { uid: ids("path"), points: finer(path), line: { color, width: solid ? 7 : 2.6 } },
      ];
      return [
        ...(solid ? lines.slice(1) : lines),
        {
          uid: ids("snapshots"), points, hover: stepWords(path),
          marker: {
            color: solid ? color : each(look.card, color), opacity: 1, size: each(12, 6, 12),
            symbol: each(solid ? "circle-open" : "circle", "circle", "square"),
            line: solid ? { width: 0 } : { width: each(3, 1.5), color: each(color, look.card) },
          },
        },
      ];
    });
  }

  const keysOf = (found, look) => (
    found.kind === "path"
      ? [
        ...found.paths.map((path, place) => (
          { name: path.name || "the run", color: lineStyle(place, look.theme).color, mark: "line" }
        )),
        { name: "start", color: look.ink, mark: "ring" }, { name: "end", color: look.ink, mark: "box" },
      ]
      : [{ name: "the model", color: look.ink, mark: "ring" }]
  );

  const traceOf = ({ uid, points, line, marker, hover }, more) => ({
    uid, x: points.map(([x]) => x), y: points.map(([, y]) => y),
    ...(line ? { mode: "lines", line } : { mode: "markers", marker }),
    ...(hover ? { text: hover, hoverinfo: "text" } : { hoverinfo: "skip" }), ...more,
  });

  const share = (found, place) => (
    isNumber(found.explained[place]) ? `, ${Math.round(100 * found.explained[place])}% of the variance` : ""
  );

  // What the axes are: random directions, or the directions in which the snapshots of a run differ most.
  function axisTitles(found, narrow) {
    const word = found.kind === "path" ? (narrow ? "PC" : "principal component") : "direction";
    return found.kind === "path" && narrow
      ? [0, 1].map((place) => `${word} ${place + 1}${share(found, place).replace(" of the variance", "")}`)
      : ["first", "second"].map((name, place) => `${name} ${word}${share(found, place)}`);
  }

  const barOf = (scale, look) => ({
    title: { text: scale.log ? "loss (log)" : "loss", font: { color: look.soft } }, thickness: 12, outlinewidth: 0,
    tickfont: { color: look.ink }, ...ticksOf(scale), ...(look.narrow ? { thickness: 9, xpad: 4 } : {}),
  });

  // Plotly makes the id of a contour's clip path from its uid, so each on the page needs its own: else the first clips them all.
  const uids = new WeakMap();
  let made = 0;
  const ownUid = (found) => uids.get(found) || uids.set(found, `contour${++made}`).get(found);

  function contourFigure(found, set, context) {
    const { look } = context, scale = scaleOf(set.loss.flat()), [first, second] = axisTitles(found, look.narrow);
    const spans = [found.x, found.y].map((side) => side.at(-1) - side[0] || 1), ratio = spans[0] / spans[1];
    const anchor = ratio > 0.6 && ratio < 1.7 ? { scaleanchor: "x" } : {}; // else the chart would be a strip
    const marks = marksOf(found, look, false).map((mark) => traceOf(mark, { type: "scatter", cliponaxis: false }));
    return {
      height: Math.min(520, 0.8 * look.width + 60), width: 680, keys: keysOf(found, look),
      data: [
        {
          type: "contour", uid: ownUid(found), x: found.x, y: found.y, z: set.loss.map((row) => row.map(scale.at)),
          colorscale: "Viridis", zmin: scale.low, zmax: scale.high, autocontour: false, connectgaps: false,
          contours: scale.levels,
          line: { width: 0.5, color: "rgba(255,255,255,.35)" }, colorbar: barOf(scale, look), text: pointWords(found, set),
          hoverinfo: "text",
        },
        ...marks,
      ],
      layout: layout(look, {
        hovermode: "closest", uirevision: `contour ${set.name}`,
        xaxis: { title: { text: first }, constrain: "domain", showgrid: false },
        yaxis: { title: { text: second }, constrain: "domain", showgrid: false, ...anchor },
      }),
    };
  }

  // Sizes are larger in 3-D.
  const smaller = (sizes) => (Array.isArray(sizes) ? sizes.map((size) => 0.55 * size) : 0.55 * sizes);

  // camera: where the user has turned it, if anywhere.
  function solidFigure(found, set, context, camera) {
    const { look } = context, home = homeOf(look.narrow), scale = scaleOf(set.loss.flat());
    const z = set.loss.map((row) => row.map(scale.at)), above = (height) => (height === null ? null : height + lift);
    const lift = 0.025 * (scale.high - scale.low), [first, second] = axisTitles(found, true);
    const axis = (title, more = {}) => ({
      title: { text: title, font: { size: 12, color: look.soft } }, color: look.soft, gridcolor: look.line,
      zerolinecolor: look.line, showbackground: false, showspikes: false, nticks: 6, tickfont: { size: 11 }, ...more,
    });
    const marks = marksOf(found, look, true).map((mark) => traceOf(mark, {
      type: "scatter3d",
      z: mark.points.map(([x, y]) => above(heightAt(found, z, x, y))),
      ...(mark.marker ? { marker: { ...mark.marker, size: smaller(mark.marker.size) } } : {}),
    }));
    return {
      height: Math.min(520, 0.75 * look.width + 50), width: 760, keys: keysOf(found, look), camera: home,
      data: [
        {
          type: "surface", uid: "surface", x: found.x, y: found.y, z, colorscale: "Viridis", cmin: scale.low, cmax: scale.high,
          connectgaps: false, showscale: !look.narrow, colorbar: { ...barOf(scale, look), len: 0.75 },
          text: pointWords(found, set), hoverinfo: "text",
          lighting: { ambient: 0.75, diffuse: 0.5, specular: 0.08, roughness: 0.9 },
          contours: {
            z: {
              ...scale.levels, show: true, color: "#8fa3ad", width: 1, highlight: false,
            },
            x: { highlight: false }, y: { highlight: false },
          },
        },
        ...marks,
      ],
      layout: layout(look, {
        uirevision: "solid", margin: { l: 0, r: 0, t: 0, b: 0 },
        scene: {
          xaxis: axis(first), yaxis: axis(second), zaxis: axis(scale.log ? "loss (log)" : "loss", ticksOf(fewer(scale))),
          dragmode: "turntable",
          aspectmode: "manual", aspectratio: { x: 1, y: 1, z: 0.7 }, camera: camera || home, uirevision: "solid",
        },
      }),
    };
  }

  // Turn a surface by some degrees around its height, for those who do not drag it.
  function turn(plot, degrees) {
    const scene = plot.layout && plot.layout.scene;
    if (!scene) return;
    const { eye, ...rest } = scene.camera, angle = (degrees * Math.PI) / 180, [c, s] = [Math.cos(angle), Math.sin(angle)];
    const turned = { x: c * eye.x - s * eye.y, y: s * eye.x + c * eye.y, z: eye.z };
    window.Plotly.relayout(plot, { "scene.camera": { ...rest, eye: turned } });
  }

  Object.assign(window.Paceline, { hasWebGL, scaleOf, contourFigure, solidFigure, turn });
})();
