// The sections without charts: the results of each run, its contract, its notes and its environment.
"use strict";
(() => {
  const {
    state, trains, theme, colorPlace, isNumber, commas, plain, figure, time, unitOf, node, table, pairs, twoParts, sentence, badge,
    key, column, bestOf, miniBanner,
  } = window.Paceline;

  function overview(sources) {
    const items = [], found = trains(sources).length === 1 ? tiles(trains(sources)[0]) : null;
    if (sources.length === 1 && sources[0].study && sources[0].study.mini) items.push(miniBanner(sources[0]));
    if (sources.length === 1 && sources[0].error) items.push(failure(sources[0]));
    if (found) items.push(found);
    if (sources.length > 1 && !state.listed) items.push(runsTable(sources));
    return items;
  }

  // Links to the sections below, [id, title]; first to the problems of the records.
  function navigation(sources, links) {
    const problems = sources.reduce((count, source) => count + source.problems.length, 0);
    if (links.length < 3 && !problems) return [];
    const first = node(
      "li", {}, node("a", { class: "badge warn", href: "#notes" }, problems === 1 ? "1 problem" : `${problems} problems`),
    );
    return [{
      key: "nav", sign: [problems, links],
      make: () => node(
        "ul", { class: "nav" }, problems ? first : null,
        ...links.map(([id, title]) => node("li", {}, node("a", { href: `#${id}` }, title))),
      ),
    }];
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
      node("p", { class: "why" }, badge(source), " ", node("strong", {}, ...sentence(source.error.why))), ...evidence(source.error, source.id),
    ),
  });

  // The errors of some of several runs, folded.
  function failures(failed) {
    const count = failed.length === 1 ? `Why ${failed[0].name} did not finish` : `Why ${failed.length} runs did not finish`;
    return node(
      "details", { class: "failures" }, node("summary", { "data-focus": "failures" }, count),
      ...failed.map((source) => node(
        "div", {}, node("p", {}, badge(source), " ", node("strong", {}, source.name), ": ", ...sentence(source.error.why)),
        ...evidence(source.error, source.id),
      )),
    );
  }

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
    const joins = source.joins || [];
    if (joins.length) {
      const spent = joins.reduce((sum, join) => sum + join.join_s, 0);
      add("joining time", time(spent), joins.length === 1 ? "1 join" : `${commas(joins.length)} joins`);
    }
    if (isNumber(last.steps)) {
      add(
        "steps", commas(last.steps),
        isNumber(facts.total_steps) && facts.total_steps !== last.steps
          ? `of ${commas(facts.total_steps)}` : isNumber(last.epochs) ? `in ${commas(last.epochs)} epoch${last.epochs === 1 ? "" : "s"}` : "",
      );
    }
    if (!said.length) return null; // it ended before there was a result
    if (isNumber(facts.workers)) {
      add("workers", source.workers || commas(facts.workers), isNumber(facts.virtual_workers) ? `V = ${commas(facts.virtual_workers)}` : "");
    }
    if (source.batch) {
      const [batches, phases] = source.batch.split(" in ");
      add("global batch", batches, phases);
    }
    if (isNumber(last.noise_scale)) add("noise scale", commas(Math.round(last.noise_scale)), unitOf([source]));
    return {
      key: "tiles", sign: said,
      make: () => {
        const list = node(
          "dl", { class: "tiles" },
          ...said.map(([name, value, small]) => node(
            "div", {}, node("dt", {}, name), node("dd", {}, value, small ? node("small", {}, small) : null),
          )),
        );
        list.style.maxWidth = `${16 * said.length}rem`; // few of them do not get wider
        return list;
      },
    };
  }

  // A fact of a run's contract; of a batch, or workers, that change during the run: their range.
  function factOf({ facts, batch, workers }, name) {
    if (name === "steps_per_epoch" && batch) return undefined; // its epochs differ
    return ({ global_batch: batch, workers })[name] || facts[name];
  }

  const bests = (source) => ["accuracy", "loss"].map((name) => {
    const best = bestOf(source, name);
    return best ? `${figure(best.value)} (${isNumber(best.epoch) ? commas(best.epoch) : "–"})` : "–";
  });

  function runsTable(sources) {
    const facts = sources.map(
      (source) => [source.id, source.name, source.status, source.summary, source.error, source.last, source.batch, source.workers, bests(source), colorPlace(source.id), theme()]
    );
    return { key: "runs", sign: facts, make: () => {
      const runs = trains(sources), number = (value, said = commas) => (isNumber(value) ? said(value) : value || "–");
      const name = (source) => node(
        "span", { class: "named", title: source.name }, key(source.id), node("span", { class: "two-parts" }, ...twoParts(source.name)),
      );
      const columns = [
        ["run", name], ["status", badge], ["accuracy", ({ last }) => number(last.accuracy, figure)],
        ["best (epoch)", (source) => bests(source)[0]], ["validation loss", ({ last }) => number(last.loss, figure)],
        ["best (epoch)", (source) => bests(source)[1]],
        [`${unitOf(runs)}/s`, ({ last }) => (last.samples_per_s ? commas(last.samples_per_s) : "–")],
        ["time", ({ last }) => (last.time_s ? time(last.time_s) : "–")], ["steps", ({ last }) => number(last.steps)],
        ...[["workers", "workers"], ["V", "virtual_workers"], ["global batch", "global_batch"]]
          .map(([title, fact]) => [title, (source) => number(factOf(source, fact))])
          .filter(([, cell]) => new Set(runs.map(cell)).size > 1), // the same for all: not a result
      ];
      const box = table({
        head: columns.map(([title]) => title), rows: runs.map((source) => columns.map(([, cell]) => cell(source))), numbers: 2,
        caption: "Results of each run",
      });
      box.querySelector("caption").classList.add("quiet");
      if (runs.length > 5) box.classList.add("tall", "short");
      const failed = sources.filter((source) => source.error);
      const list = node("ul", { class: "list" }, ...sources.map((source) => node("li", {}, ...sentence(source.summary))));
      return node(
        "div", { class: "card results" }, runs.length > 1 ? box : null,
        node(
          "div", { class: "folds" }, failed.length ? failures(failed) : null,
          node("details", {}, node("summary", { "data-focus": "sentences" }, "Each run in a sentence"), list),
        ),
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
  const OWN = new Set(["record", "name", "runs_dir", "resume", "resumed_at", "extended", "validated", "took_over_from"]);
  const YES = new Map([[undefined, "–"], [true, "yes"], [false, "no"]]);
  const worded = (value) => YES.get(value) ?? (isNumber(value) ? plain(value) : String(value));

  // What differs between runs: fields of their contracts, and options that the contract does not show.
  function differences(sources) {
    const runs = trains(sources).filter((source) => Object.keys(source.facts).length || Object.keys(source.options || {}).length);
    if (runs.length < 2) return [];
    const valueOf = (run, name) => (name in run.facts ? factOf(run, name) : (run.options || {})[name]);
    return [{ key: "many", sign: runs.map((source) => [source.id, source.name, source.facts, source.options]), make: () => {
      const all = ["facts", "options"].flatMap((table) => runs.flatMap((run) => Object.keys(run[table] || {})));
      const names = [...new Set(all)].filter((name) => !OWN.has(name));
      const rows = names.map((name) => ({ name: name.replace(/_/g, " "), values: runs.map((run) => valueOf(run, name)) }));
      const differ = rows.filter(({ values }) => new Set(values.filter((value) => value !== undefined)).size > 1);
      const same = rows.filter((row) => !differ.includes(row));
      const card = node("div", { class: "card" });
      if (differ.length) {
        const box = table({
          head: ["option", ...runs.map((source) => source.name)], caption: "Where the runs differ",
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
            ? source.name : [source.problems.length ? "Problems" : "", source.notes.length ? "Notes" : ""].filter(Boolean).join(" and "),
        ),
        node(
          "ul", { class: "list" }, ...source.problems.map((text) => node("li", { class: "problem" }, ...sentence(text))),
          ...source.notes.map((text) => node("li", {}, ...sentence(text))),
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

  // On the board, whose list shows the results already, the table comes after the curves.
  const results = (sources) => (state.listed && sources.length > 1 ? [runsTable(sources)] : []);

  window.Paceline.sections.results = { title: "Results", make: results };
  window.Paceline.sections.differences = { title: "Differences", make: differences };
  window.Paceline.sections.contract = { title: "Contract", make: contract };
  window.Paceline.sections.notes = { title: "Notes and problems", make: notes };
  window.Paceline.sections.environment = { title: "Environment", make: environment };
  Object.assign(window.Paceline, { overview, navigation });
})();
