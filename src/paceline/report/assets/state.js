// State: the sources, what the user selected, each run's place in the palette, light or dark.
// This file comes first: it creates the namespace that the page's scripts share (page.py has their order).
//
// To add a chart: write it in the file of its section (curves.js, steps.js, layers.js, scaling.js, timeline.js, study.js ...), as an
// item made by chart() from charts.js. For a new section: a new file that sets Paceline.sections.NAME = { title, make }, its name
// in SCRIPTS (page.py) and in ORDER (page.js), and its data in what read_source returns (read.py).
"use strict";
window.Paceline = { sections: {} };
(() => {
  // Okabe and Ito's colors, darker on a light page and lighter on a dark one, so that lines can be told apart on both.
  const RUNS = {
    light: ["#0072b2", "#d55e00", "#00845f", "#b0458a", "#8a6d00", "#1f2937", "#6b4fbb", "#7c8594"],
    dark: ["#56b4e9", "#ff8a4c", "#2fcb9c", "#e58fc2", "#e6c229", "#f4f6fa", "#b39dff", "#8b95a5"],
  };
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const state = {
    root: null, sources: [], x: "step", hidden: new Set(), log: new Map(), step: new Map(),
    smooth: 0, // the weight of smoothing; 0: off
    share: false, // components of a step as shares, not as times
    gradients: false, // layers by the norms of their gradients, not by how far they move
    all: new Set(), // the charts that also show far values
    set: new Map(), solid: new Map(), // the set that a loss surface shows; the surfaces in 3-D, with their cameras
    listed: document.getElementById("board") !== null, // on the board, a list of all runs is above the page
  };
  const places = new Map(); // a run's id -> its place in the palette while it is shown

  const visible = (sources) => sources.filter((source) => !state.hidden.has(source.id));
  const trains = (sources) => sources.filter((source) => source.kind === "train");

  // ---- colors --------------------------------------------------------------------------------------------------
  // A new run takes the first free place and keeps it while it is shown; then the place is free again.
  function givePlaces(sources) {
    const ids = new Set(sources.map((source) => source.id));
    for (const id of [...places.keys()]) if (!ids.has(id)) places.delete(id);
    const taken = new Set(places.values());
    for (const id of ids) {
      if (places.has(id)) continue;
      let place = 0;
      while (taken.has(place)) place++;
      taken.add(place);
      places.set(id, place);
    }
  }

  const colorPlace = (id) => places.get(id) ?? 0;

  function lineStyle(place, theme) {
    const palette = RUNS[theme];
    return { color: palette[place % palette.length], dash: DASHES[Math.floor(place / palette.length) % DASHES.length] };
  }

  // The color of a run's lines; undefined for a run that is not shown.
  const color = (id) => (places.has(id) ? lineStyle(places.get(id), theme()).color : undefined);

  // ---- light and dark -------------------------------------------------------------------------------------------
  const theme = () => (document.documentElement.dataset.theme === "dark" ? "dark" : "light");

  function setTheme(value, keep) {
    document.documentElement.dataset.theme = value;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = value === "dark" ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to ${value === "dark" ? "light" : "dark"} colors`);
    }
    if (keep) {
      try { localStorage.setItem("paceline-theme", value); } catch {
        /* a page opened from a file may have no storage: the choice lasts as long as the page */
      }
    }
    window.Paceline.redraw();
    document.dispatchEvent(new CustomEvent("paceline:theme", { detail: value }));
  }

  function startTheme() {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    let kept = null;
    try { kept = localStorage.getItem("paceline-theme"); } catch { /* as above */ }
    let wish = kept === "dark" || kept === "light" ? kept : null; // null: follow the system
    const follow = () => setTheme(wish || (dark.matches ? "dark" : "light"), false);
    follow();
    dark.addEventListener("change", follow);
    const button = document.getElementById("theme");
    if (button) button.addEventListener("click", () => setTheme((wish = theme() === "dark" ? "light" : "dark"), true));
  }

  Object.assign(window.Paceline, { state, visible, trains, givePlaces, colorPlace, lineStyle, color, theme, startTheme });
})();
