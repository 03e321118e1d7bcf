// What is shown and in which colours: the sources, what the user chose of them, every run's place in the palette, light or dark.
// This file comes first: it makes the namespace that the page's scripts share (page.py has their order).
"use strict";
window.Paceline = { sections: {} };
(() => {
  // Okabe and Ito's colours, darker for a light page and lighter for a dark one, so that lines can be told apart on both.
  const RUNS = {
    light: ["#0072b2", "#d55e00", "#00845f", "#b0458a", "#8a6d00", "#1f2937", "#6b4fbb", "#7c8594"],
    dark: ["#56b4e9", "#ff8a4c", "#2fcb9c", "#e58fc2", "#e6c229", "#f4f6fa", "#b39dff", "#8b95a5"],
  };
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const state = {
    root: null, sources: [], chartsFirst: false, x: "step", hidden: new Set(), log: new Map(), step: new Map(),
  };
  const places = new Map(); // a run's id -> its place in the palette, while it is shown

  const visible = (sources) => sources.filter((source) => !state.hidden.has(source.id));
  const trains = (sources) => sources.filter((source) => source.kind === "train");

  // ---- colours --------------------------------------------------------------------------------------------------
  // A run that is new takes the first place that is free, and keeps it while it is shown; one that is gone gives its place back.
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

  const colourPlace = (id) => places.get(id) ?? 0;

  function lineStyle(place, theme) {
    const palette = RUNS[theme];
    return { color: palette[place % palette.length], dash: DASHES[Math.floor(place / palette.length) % DASHES.length] };
  }

  // The colour of a run's lines; undefined for one that is not shown.
  const colour = (id) => (places.has(id) ? lineStyle(places.get(id), theme()).color : undefined);

  // ---- light and dark -------------------------------------------------------------------------------------------
  const theme = () => (document.documentElement.dataset.theme === "dark" ? "dark" : "light");

  function setTheme(value, keep) {
    document.documentElement.dataset.theme = value;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = value === "dark" ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to ${value === "dark" ? "light" : "dark"} colours`);
    }
    if (keep) {
      try { localStorage.setItem("paceline-theme", value); } catch {
        /* a page from a file may have no storage: the choice lasts as long as the page */
      }
    }
    window.Paceline.redraw();
    document.dispatchEvent(new CustomEvent("paceline:theme", { detail: value }));
  }

  function startTheme() {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    let kept = null;
    try { kept = localStorage.getItem("paceline-theme"); } catch { /* as above */ }
    let wish = kept === "dark" || kept === "light" ? kept : null; // the system's, until somebody says otherwise
    const follow = () => setTheme(wish || (dark.matches ? "dark" : "light"), false);
    follow();
    dark.addEventListener("change", follow);
    const button = document.getElementById("theme");
    if (button) button.addEventListener("click", () => setTheme((wish = theme() === "dark" ? "light" : "dark"), true));
  }

  Object.assign(window.Paceline, { state, visible, trains, givePlaces, colourPlace, lineStyle, colour, theme, startTheme });
})();
