// The sections without charts: the results of each run, its contract, its notes and its environment.
"use strict";
(() => {
  const {
    trains, theme, colorPlace, isNumber, commas, plain, figure, time, unitOf, node, table, pairs, badge, key, column, bestOf,
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
    if (sources.length === 1 && sources[0].error) items.unshift(failure(sources[0]));
    for (const source of sources.filter((each) => each.study && each.study.mini)) items.unshift(mini(source));
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

  const block = (text) => node("pre", { tabindex: "0" }, text);

  // The line of the user's code where a run failed, and the folded traceback.
  const evidence = ({ where, traceback }, id) => [
    where ? block(where) : "",
    traceback ? node("details", {}, node("summary", { "data-focus": `traceback ${id}` }, "Full traceback"), block(traceback)) : "",
  ];

  // The error of the only run on the page.
  const failure = (source) => ({
    key: "failure", sign: [source.status, source.error],
    make: () => node(
      "div", { class: "card failure", role: "region", "aria-label": "Error" },
      node("p", { class: "why" }, badge(source), " ", node("strong", {}, source.error.why)), ...evidence(source.error, source.id),
    ),
  });

  // The errors of some of several runs, folded.
  function failures(failed) {
    const count = failed.length === 1 ? `Why ${failed[0].name} did not finish` : `Why ${failed.length} runs did not finish`;
    return node(
      "details", { class: "failures" }, node("summary", { "data-focus": "failures" }, count),
      ...failed.map((source) => node(
        "div", {}, node("p", {}, badge(source), " ", node("strong", {}, source.name), `: ${source.error.why}`),
        ...evidence(source.error, source.id),
      )),
    );
  }

  const mini = (source) => ({
    key: `mini ${source.id}`, sign: source.name,
    make: () => node(
      "p", { class: "banner", role: "note" },
      node("strong", {}, "A trial run of the study: its numbers mean nothing. "),
      `${source.name} was run with --mini, which only tests every arm's options on a few steps of small data.`,
    ),
  });

  // "best 0.8910 in epoch 5" for a value that is not the best itself.
  function besides(source, name, value) {
    const best = bestOf(source, name);
    if (!best || !isNumber(best.epoch)) return "";
    const epochs = column(source, "epoch", `val_${name}`).filter(isNumber).length;
    if (figure(best.value) === figure(value)) return epochs > 1 ? `best of ${commas(epochs)} epochs` : "";
    return `best ${figure(best.value)}, epoch ${commas(best.epoch)}`;
  }

  function tiles(source) {
    const last = source.last, facts = source.facts, said = [], add = (name, value, small) => said.push([name, value, small || ""]);
    if (isNumber(last.accuracy)) add("accuracy", figure(last.accuracy), besides(source, "accuracy", last.accuracy));
    if (isNumber(last.loss)) add("validation loss", figure(last.loss), besides(source, "loss", last.loss));
    else if (isNumber(last.train_loss)) add("training loss", plain(last.train_loss));
    if (isNumber(last.samples_per_s) && last.samples_per_s) add(`${unitOf([source])}/s`, commas(last.samples_per_s));
    if (isNumber(last.time_s) && last.time_s) add("training time", time(last.time_s));
    if (isNumber(last.steps)) {
      add(
        "steps", commas(last.steps),
        isNumber(facts.total_steps) && facts.total_steps !== last.steps
          ? `of ${commas(facts.total_steps)}` : isNumber(last.epochs) ? `in ${commas(last.epochs)} epoch${last.epochs === 1 ? "" : "s"}` : "",
      );
    }
    if (isNumber(facts.workers)) {
      add("workers", commas(facts.workers), isNumber(facts.virtual_workers) ? `V = ${commas(facts.virtual_workers)}` : "");
    }
    if (isNumber(last.noise_scale)) add("noise scale", commas(Math.round(last.noise_scale)), unitOf([source]));
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

  const bests = (source) => ["accuracy", "loss"].map((name) => {
    const best = bestOf(source, name);
    return best ? `${figure(best.value)} (${isNumber(best.epoch) ? commas(best.epoch) : "–"})` : "–";
  });

  function runsTable(sources) {
    const facts = sources.map(
      (source) => [source.id, source.name, source.status, source.summary, source.error, source.last, bests(source), colorPlace(source.id), theme()]
    );
    return { key: "runs", sign: facts, make: () => {
      const runs = trains(sources), rows = runs.map((source) => {
        const last = source.last, best = bests(source),
          number = (value, said = commas) => (isNumber(value) ? said(value) : "–");
        const name = node("span", { class: "named" }, key(source.id), node("span", {}, source.name));
        return [
          name, badge(source), number(last.accuracy, figure), best[0], number(last.loss, figure), best[1],
          last.samples_per_s ? commas(last.samples_per_s) : "–", last.time_s ? time(last.time_s) : "–", number(last.steps),
          number(source.facts.workers), number(source.facts.virtual_workers), number(source.facts.global_batch),
        ];
      });
      const box = table({
        head: [
          "run", "status", "accuracy", "best (epoch)", "validation loss", "best (epoch)", `${unitOf(runs)}/s`, "time", "steps",
          "workers", "V", "global batch",
        ],
        rows, numbers: 2, caption: "Results of each run",
      });
      if (runs.length > 6) box.classList.add("tall", "short");
      const failed = sources.filter((source) => source.error);
      const list = node("ul", { class: "list" }, ...sources.map((source) => node("li", {}, source.summary)));
      return node(
        "div", { class: "card" }, runs.length > 1 ? box : null,
        failed.length ? failures(failed) : null,
        node("details", {}, node("summary", { "data-focus": "sentences" }, "Each run in a sentence"), list),
      );
    } };
  }

  function contract(sources) {
    const runs = trains(sources), with_ = (runs.length ? runs : sources).filter((source) => source.contract.length);
    if (with_.length !== 1) return [];
    const [{ id, name, contract: lines }] = with_;
    return [{ key: "one", sign: [id, name, lines], make: () => node("div", { class: "card" }, pairs(lines, "Contract")) }];
  }

  // Names and folders of runs always differ, and say nothing about the training.
  const OWN = new Set(["record", "name", "runs_dir", "resume", "resumed_at", "extended"]);
  const YES = new Map([[undefined, "–"], [true, "yes"], [false, "no"]]);
  const worded = (value) => YES.get(value) ?? (isNumber(value) ? plain(value) : String(value));

  // What differs between runs: fields of their contracts, and options that the contract does not show.
  function differences(sources) {
    const runs = trains(sources).filter((source) => Object.keys(source.facts).length || Object.keys(source.options || {}).length);
    if (runs.length < 2) return [];
    const valueOf = ({ facts, options = {} }, name) => (name in facts ? facts[name] : options[name]);
    return [{ key: "many", sign: runs.map((source) => [source.id, source.name, source.facts, source.options]), make: () => {
      const all = ["facts", "options"].flatMap((table) => runs.flatMap((run) => Object.keys(run[table] || {})));
      const names = [...new Set(all)].filter((name) => !OWN.has(name));
      const rows = names.map((name) => ({ name: name.replace(/_/g, " "), values: runs.map((run) => valueOf(run, name)) }));
      const differ = rows.filter(({ values }) => new Set(values.filter((value) => value !== undefined)).size > 1);
      const same = rows.filter((row) => !differ.includes(row));
      const card = node("div", { class: "card" });
      if (differ.length) {
        const box = table({
          head: ["differs", ...runs.map((source) => source.name)], caption: "Where the runs differ",
          rows: differ.map(({ name, values }) => [name, ...values.map(worded)]),
        });
        box.querySelectorAll("tbody td").forEach((cell) => cell.classList.add(runs.length > 4 ? "few-words" : "words"));
        box.querySelectorAll("thead th").forEach((cell) => cell.classList.add("wrapped"));
        card.append(box);
      } else card.append(node("p", { class: "text" }, "These runs have the same contract and the same options."));
      if (same.length) {
        card.append(node(
          "details", {}, node("summary", { "data-focus": "same" }, `The same for all (${same.length})`),
          pairs(same.map(({ name, values }) => [name, worded(values.find((value) => value !== undefined))]), "The same for all"),
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

  window.Paceline.sections.differences = { title: "Differences", make: differences };
  window.Paceline.sections.contract = { title: "Contract", make: contract };
  window.Paceline.sections.notes = { title: "Notes and problems", make: notes };
  window.Paceline.sections.environment = { title: "Environment", make: environment };
  Object.assign(window.Paceline, { overview });
})();
