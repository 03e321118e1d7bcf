// The page: sections of cards and charts. Paceline.render builds it; Paceline.update redraws it in place and keeps the zoom, the
// selected x axis, hidden runs and open tables. ORDER is the order of the sections. This file comes last: it starts drawing.
"use strict";
(() => {
  const { sections, state, givePlaces, startTheme, reconcile, node, overview, navigation } = window.Paceline;
  const ORDER = [
    "tools", "curves", "toys", "results", "learning", "study", "scaling", "differences", "step", "layers", "timeline", "landscape",
    "sharpness", "contract", "notes", "environment",
  ];

  // options.headline: the sentence at the top.
  function render(root, sources, options = {}) {
    state.root = root;
    root.replaceChildren();
    update(sources, options);
  }

  function update(sources, options = {}) {
    state.sources = sources;
    givePlaces(sources);
    if (options.headline !== undefined) headline(options.headline);
    redraw();
  }

  function redraw() {
    if (!state.root) return;
    const found = ORDER.map((id) => ({ id, ...sections[id], items: sections[id].make(state.sources) }))
      .filter((section) => section.items.length);
    const links = found.filter((section) => section.title).map(({ id, title }) => [id, title]);
    found.unshift({ id: "overview", title: "", items: overview(state.sources) });
    reconcile(document.getElementById("sections"), navigation(state.sources, links));
    reconcile(state.root, found.filter((section) => section.items.length).map(shell));
  }

  function shell({ id, title, grid, quiet, items }) {
    return {
      key: id,
      make: () => {
        if (id === "tools") return node("div", { class: "toolbar", role: "group", "aria-label": "Chart options" });
        const body = node("div", { class: grid ? "grid" : "" });
        return title
          ? node("section", { id, "aria-labelledby": `${id}-title` }, node("h2", { id: `${id}-title`, class: quiet ? "quiet" : "" }, title), body)
          : node("section", { id, "aria-label": "Overview" }, body);
      },
      update: (element) => reconcile(id === "tools" ? element : element.lastElementChild, items),
    };
  }

  function headline(text) {
    const element = document.getElementById("headline");
    if (element) element.textContent = text;
  }

  // The library that draws the charts did not load: say so, instead of leaving empty cards.
  function noCharts() {
    document.getElementById("no-charts").hidden = false;
    document.documentElement.classList.add("no-charts");
  }

  Object.assign(window.Paceline, { render, update, redraw, headline, noCharts });
  startTheme();
  const embedded = document.getElementById("sources"), main = document.getElementById("page");
  if (embedded && main) queueMicrotask(() => render(main, JSON.parse(embedded.textContent)));
})();
