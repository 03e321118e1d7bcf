// The sections without charts: the results of each run, its contract, its notes and its environment.
"use strict";
(() => {
  const {
    trains, theme, colorPlace, isNumber, commas, plain, figure, time, unitOf, node, table, pairs, badge, key,
  } = window.Paceline;

  // `links`: [id, title] of the sections below.
  function overview(sources, links) {
    const items = [], problems = sources.reduce((count, source) => count + source.problems.length, 0);
    if (trains(sources).length === 1) items.push(tiles(trains(sources)[0]));
    if (sources.length > 1) items.push(runsTable(sources));
    if (problems) {
      items.unshift({
        key: "warned", sign: problems,
        make: () => node(
          "p", { class: "warned" },
          node(
            "span", { class: "badge warn" },
            problems === 1 ? "1 problem" : `${problems} problems`,
          ),
          " ", node("a", { href: "#notes" }, "what is missing or broken"),
        ),
      });
    }
    if (links.length > 2) {
      items.push({
        key: "nav", sign: links,
        make: () => node(
          "nav", { "aria-label": "Sections" },
          node("ul", { class: "nav" }, ...links.map(([id, title]) => node("li", {}, node("a", { href: `#${id}` }, title)))),
        ),
      });
    }
    return items;
  }

  function tiles(source) {
    const last = source.last, facts = source.facts, said = [], add = (name, value, small) => said.push([name, value, small || ""]);
    if (isNumber(last.accuracy)) add("accuracy", figure(last.accuracy));
    if (isNumber(last.loss)) add("validation loss", figure(last.loss));
    else if (isNumber(last.train_loss)) add("training loss", plain(last.train_loss));
    if (isNumber(last.samples_per_s) && last.samples_per_s) add(`${unitOf([source])}/s`, commas(last.samples_per_s));
    if (isNumber(last.time_s) && last.time_s) add("training time", time(last.time_s));
    if (isNumber(last.steps)) {
      add(
        "steps", commas(last.steps),
        isNumber(facts.total_steps) && facts.total_steps !== last.steps
          ? ` of ${commas(facts.total_steps)}` : isNumber(last.epochs) ? ` in ${commas(last.epochs)} epoch${last.epochs === 1 ? "" : "s"}` : "",
      );
    }
    if (isNumber(facts.workers)) {
      add("workers", commas(facts.workers), isNumber(facts.virtual_workers) ? ` V = ${commas(facts.virtual_workers)}` : "");
    }
    if (isNumber(last.noise_scale)) add("noise scale", commas(Math.round(last.noise_scale)), ` ${unitOf([source])}`);
    return {
      key: "tiles", sign: said,
      make: () => node(
        "dl", { class: "tiles" },
        ...said.map(([name, value, small]) => node(
          "div", {}, node("dt", {}, name), node("dd", {}, value, small ? node("small", {}, small) : null),
        )),
      ),
    };
  }

  function runsTable(sources) {
    const facts = sources.map(
      (source) => [source.id, source.name, source.status, source.summary, source.last, colorPlace(source.id), theme()]
    );
    return { key: "runs", sign: facts, make: () => {
      const runs = trains(sources), rows = runs.map((source) => {
        const last = source.last,
          number = (value, said = commas) => (isNumber(value) ? said(value) : "–");
        const name = node("span", { class: "named" }, key(source.id), node("span", {}, source.name));
        return [
          name, badge(source), number(last.accuracy, figure), number(last.loss, figure),
          last.samples_per_s ? commas(last.samples_per_s) : "–", last.time_s ? time(last.time_s) : "–", number(last.steps),
          number(source.facts.workers), number(source.facts.virtual_workers), number(source.facts.global_batch),
        ];
      });
      const box = table({
        head: [
          "run", "status", "accuracy", "validation loss", `${unitOf(runs)}/s`, "time", "steps", "workers", "V", "global batch",
        ],
        rows, numbers: 2, caption: "Results of each run",
      });
      const list = node("ul", { class: "list" }, ...sources.map((source) => node("li", {}, source.summary)));
      return node(
        "div", { class: "card" }, runs.length > 1 ? box : null,
        node("details", {}, node("summary", {}, "Each run in a sentence"), list),
      );
    } };
  }

  function contract(sources) {
    const runs = trains(sources), with_ = (runs.length ? runs : sources).filter((source) => source.contract.length);
    if (!with_.length) return [];
    const sign = with_.map((source) => [source.id, source.name, source.contract]);
    if (with_.length === 1) {
      return [{ key: "one", sign, make: () => node("div", { class: "card" }, pairs(with_[0].contract, "Contract")) }];
    }
    return [{ key: "many", sign, make: () => {
      const names = [...new Set(with_.flatMap((source) => source.contract.map(([what]) => what)))]
        .filter((name) => name !== "record"); // the column heads name the runs
      const rows = names.map(
        (name) => [name, ...with_.map((source) => (source.contract.find(([what]) => what === name) || [name, "–"])[1])]
      );
      const same = rows.filter((row) => row.slice(1).every((text) => text === row[1])),
        differ = rows.filter((row) => !same.includes(row));
      const card = node("div", { class: "card" });
      if (differ.length) {
        const box = table(
          { head: ["differs", ...with_.map((source) => source.name)], rows: differ, caption: "Where the runs differ" }
        );
        box.querySelectorAll("tbody td").forEach((cell) => cell.classList.add("words"));
        card.append(box);
      }
      if (same.length) {
        card.append(node(
          "details", { open: differ.length ? null : "open" }, node("summary", {}, `The same for all (${same.length})`),
          pairs(same.map((row) => [row[0], row[1]]), "The same for all"),
        ));
      }
      return card;
    } }];
  }

  function notes(sources) {
    return sources.filter((source) => source.notes.length || source.problems.length).map((source) => ({
      key: source.id, sign: [source.name, source.notes, source.problems, sources.length > 1],
      make: () => node(
        "div", { class: "card" },
        node(
          "h3", {},
          sources.length > 1
            ? source.name : source.problems.length ? "Problems, and notes of the run" : "Notes of the run",
        ),
        node(
          "ul", { class: "list" }, ...source.problems.map((text) => node("li", { class: "problem" }, text)),
          ...source.notes.map((text) => node("li", {}, text)),
        ),
      ),
    }));
  }

  function environment(sources) {
    const sign = sources.map((source) => [source.name, source.environment, source.path]),
      rows = (source) => [["folder", source.path], ...Object.entries(source.environment)];
    return [
      {
        key: "all", sign,
        make: () => node(
          "div", { class: "card" },
          ...sources.map((source) => (
            sources.length > 1
              ? node("details", {}, node("summary", {}, source.name), pairs(rows(source), `Environment of ${source.name}`))
              : pairs(rows(source), "Environment")
          )),
        ),
      },
    ];
  }

  window.Paceline.sections.contract = { title: "Contract", make: contract };
  window.Paceline.sections.notes = { title: "Notes and problems", make: notes };
  window.Paceline.sections.environment = { title: "Environment", make: environment };
  Object.assign(window.Paceline, { overview });
})();
