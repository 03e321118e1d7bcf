// The page: sections of cards and charts. Paceline.render builds it; Paceline.update redraws it in place and keeps the zoom, the
// selected x axis, hidden runs and open tables. ORDER is the order of the sections. This file comes last: it starts drawing.
"use strict";
(() => {
  const { sections, state, givePlaces, startTheme, reconcile, node, overview } = window.Paceline;
  const ORDER = ["contract", "tools", "curves", "step", "scaling", "timeline", "study", "landscape", "notes", "environment"];

  // options.chartsFirst: show a run's charts before its contract; a comparison still begins with what differs.
  // options.headline: the sentence at the top.
  function render(root, sources, options = {}) {
    state.root = root;
    state.chartsFirst = Boolean(options.chartsFirst);
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
    const found = order().map((id) => ({ id, ...sections[id], items: sections[id].make(state.sources) }))
      .filter((section) => section.items.length);
    const links = found.filter((section) => section.title).map(({ id, title }) => [id, title]);
    found.unshift({ id: "overview", title: "", items: overview(state.sources, links) });
    reconcile(state.root, found.filter((section) => section.items.length).map(shell));
  }

  function order() {
    if (!state.chartsFirst || state.sources.length > 1) return ORDER;
    return [...ORDER.filter((id) => !["contract", "notes", "environment"].includes(id)), "contract", "notes", "environment"];
  }

  function shell({ id, title, grid, items }) {
    return {
      key: id,
      make: () => {
        if (id === "tools") return node("div", { class: "toolbar", role: "group", "aria-label": "Chart options" });
        const body = node("div", { class: grid ? "grid" : "" });
        return title
          ? node("section", { id, "aria-labelledby": `${id}-title` }, node("h2", { id: `${id}-title` }, title), body)
          : node("section", { id, "aria-label": "Overview" }, body);
      },
      update: (element) => reconcile(id === "tools" ? element : element.lastElementChild, items),
    };
  }

  function headline(text) {
    const element = document.getElementById("headline");
    if (element) element.textContent = text;
  }

  Object.assign(window.Paceline, { render, update, redraw, headline });
  startTheme();
  const embedded = document.getElementById("sources"), main = document.getElementById("page");
  if (embedded && main) queueMicrotask(() => render(main, JSON.parse(embedded.textContent)));
})();
