// DOM elements: tables, badges and legend keys, and updates that keep existing elements.
// Text from records is only ever set as textContent, never as markup.
"use strict";
(() => {
  const { color, colorPlace, lineStyle, theme } = window.Paceline;

  // Make the children of a box match these items, in order. An item is made again when its `sign` changes; an item with `update`
  // is updated in place.
  function reconcile(box, items) {
    const old = new Map([...box.children].map((element) => [element.dataset.key, element]));
    const focus = document.activeElement && box.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
    items.forEach((item, index) => {
      let element = old.get(item.key);
      const sign = item.sign === undefined ? "" : JSON.stringify(item.sign);
      if (!element || element.paceline !== sign) {
        const open = element ? [...element.querySelectorAll("details")].map((each) => each.open) : [];
        const fresh = item.make();
        fresh.dataset.key = item.key;
        fresh.paceline = sign;
        fresh.querySelectorAll("details").forEach((each, place) => (each.open = open[place] || each.open));
        if (element) element.replaceWith(fresh);
        element = fresh;
      }
      old.delete(item.key);
      // Move whatever is in the way to the end: the other elements stay in place and keep their scroll position and focus.
      const here = box.children[index];
      if (here && here.nextElementSibling === element) box.append(here);
      if (box.children[index] !== element) box.insertBefore(element, box.children[index] || null);
      if (item.update) item.update(element);
    });
    for (const gone of old.values()) {
      gone.querySelectorAll(".plot").forEach((plot) => window.Plotly && plot.data && window.Plotly.purge(plot));
      gone.remove();
    }
    if (focus) {
      const again = [...box.querySelectorAll("[data-focus]")].find((each) => each.dataset.focus === focus);
      if (again && again !== document.activeElement) again.focus({ preventScroll: true });
    }
  }

  // An element with these attributes and children; empty ones are left out.
  function node(name, attributes = {}, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "onclick") element.addEventListener("click", value);
      else if (value !== null && value !== undefined && value !== false && value !== "") element.setAttribute(key, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  }

  function table({ head, rows, numbers = 99, caption, tall }) {
    const cell = (name, content, index, scope) => node(
      name, { class: index >= numbers ? "num" : "", scope }, content instanceof Node ? content : String(content ?? "–"),
    );
    const top = node("tr", {}, ...head.map((text, index) => cell("th", text, index, "col")));
    const line = (row) => node(
      "tr", {}, ...row.map((content, index) => cell(index ? "td" : "th", content, index, index ? null : "row")),
    );
    const box = { class: tall ? "table-box tall" : "table-box", tabindex: "0", role: "region", "aria-label": caption || "Table" };
    const said = caption ? node("caption", {}, caption) : null;
    return node("div", box, node("table", {}, said, node("thead", {}, top), node("tbody", {}, ...rows.map(line))));
  }

  function pairs(rows, caption) {
    return node(
      "div", { class: "table-box" },
      node(
        "table", { class: "pairs" }, node("caption", { class: "quiet" }, caption),
        node("tbody", {}, ...rows.map(([what, text]) => node("tr", {}, node("th", { scope: "row" }, what), node("td", {}, text)))),
      ),
    );
  }

  const TAIL = 11; // characters at the end of a long name that are always shown: runs of one task differ only in their time
  // A name in two elements, for class "two-parts". If there is no room for it, the first is shortened, and its end stays readable.
  function twoParts(name) {
    const cut = Math.max(0, name.length - TAIL);
    return [node("span", {}, name.slice(0, cut)), node("span", {}, name.slice(cut))];
  }

  // A sentence of a record. Its flags are not broken at their hyphens.
  const sentence = (text) => text.split(/(--[a-z][\w-]*)/).map((part, index) => (index % 2 ? node("span", { class: "flag" }, part) : part));

  const badge = (source) => node("span", { class: `badge ${source.tone || ""}` }, source.status);
  // The sample of a run's line style, shown before its name.
  const key = (id) => {
    const { dash } = lineStyle(colorPlace(id), theme());
    const element = node("span", { class: "key", "aria-hidden": "true" });
    element.style.borderTopColor = color(id) || "var(--line)"; // a run that is not read yet
    element.style.borderTopStyle = { solid: "solid", dash: "dashed", dot: "dotted", dashdot: "dashed" }[dash];
    return element;
  };

  Object.assign(window.Paceline, { reconcile, node, table, pairs, twoParts, sentence, badge, key });
})();
