// The board's state in the URL: the selected runs, open groups, order, filter and x axis.

import { COLUMNS } from "./columns.js";

const NEWEST = "-when";

/** What the URL says; of the selected runs, at most the first `most`. */
export function readAddress(most) {
  const said = new URLSearchParams(location.hash.slice(1));
  const sort = said.get("sort") || NEWEST;
  const key = sort.replace(/^-/, "");
  return {
    run: [...new Set(said.getAll("run"))].slice(0, most),
    open: [...new Set(said.getAll("open"))],
    sort: COLUMNS.some((column) => column.key === key) ? { key, way: sort.startsWith("-") ? -1 : 1 } : { key: "when", way: -1 },
    q: said.get("q") || "",
    status: said.get("status") || "",
    x: said.get("x") || "",
  };
}

/** The part of a URL that says this. */
export function makeAddress({ run, open, sort, ...rest }) {
  const said = new URLSearchParams();
  for (const id of run) said.append("run", id);
  for (const id of open) said.append("open", id);
  const order = (sort.way < 0 ? "-" : "") + sort.key;
  if (order !== NEWEST) said.set("sort", order);
  for (const name of ["q", "status", "x"]) if (rest[name]) said.set(name, rest[name]);
  return `#${said}`;
}
