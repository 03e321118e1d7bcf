"""What happened, in one sentence: for each record, and for all records on a page. Honest about runs that did not end well."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from paceline.output import plural
from paceline.records import unit_of
from paceline.status import Status

_RANKED = ("accuracy", "loss", "samples_per_s")
_ENDS = {
    Status.TARGET_REACHED: ", and reached its target.",
    Status.STOPPED_EARLY: ", and stopped early, because it no longer improved.",
}
_UNFINISHED = (Status.DIVERGED, Status.FAILED, Status.INTERRUPTED, Status.CUT_SHORT)


def headline(sources: Sequence[Mapping[str, Any]]) -> str:
    """The sentence at the top of a page: one record's summary, or which of several runs were best, fastest or failed."""
    if not sources:
        return "No record to show."
    if len(sources) == 1:  # the page shows an error below the headline, with its line: once is enough
        return summarize(sources[0], reason=not sources[0].get("error"))
    runs = [source for source in sources if source["kind"] == "train"]
    others = [source for source in sources if source["kind"] != "train"]
    if len(runs) == 1:
        return " ".join(str(source["summary"]) for source in (runs + others)[:3])
    said = [_compared(runs)] if runs else []
    said += [str(source["summary"]) for source in others[:2]]
    if len(others) > 2:
        said.append(f"And {len(others) - 2} more below.")
    return " ".join(said)


def summarize(source: Mapping[str, Any], *, reason: bool = True) -> str:
    """One record in a sentence, with or without the reason why it failed. It never raises."""
    about = {"train": _train, "scale": _scale, "study": _study, "toys": _toys}.get(source["kind"])
    if about is None:
        return f"{source['name']} cannot be read as a record: see what is missing below."
    try:
        return about(source if reason else {**source, "why": ""})
    except Exception:  # an edited or foreign record may hold anything
        return f"{source['name']} cannot be summarized: it holds values of unexpected types."


def tone(status: str) -> str:
    """The color of a status: good, bad, live or plain."""
    known = Status(status)
    if known.good:
        return "good"
    return {Status.RUNNING: "live", Status.FAILED: "bad", Status.DIVERGED: "bad"}.get(known, "plain")


def rate(value: float) -> str:
    """A speed: `7,861`; below 100 with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def figure(value: float) -> str:
    """A loss or an accuracy: `0.8820`; very small or large ones with four significant digits, `0.0001234`, `1.235e+04`."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """`3.8 s`, `1 min 15 s`, `2 h 5 min`. Rounded before it is divided, so that it never says 60 s."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s" if seconds >= 0.95 else f"{1000 * seconds:.0f} ms"
    whole, minutes = round(seconds), round(seconds / 60)
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    return f"{minutes // 60:,} h" + (f" {minutes % 60} min" if minutes % 60 else "")


def shares(components_s: Mapping[str, float]) -> str:
    """`82% of a step was compute, 11% communication`: the three largest components, if they are at least 5%."""
    whole = math.fsum(components_s.values())
    if whole <= 0:
        return ""
    ranked = sorted(((value / whole, name) for name, value in components_s.items()), reverse=True)[:3]
    words = [f"{share:.0%} {name}" for share, name in ranked if share >= 0.05]
    if not words:
        return ""
    first, rest = words[0].split(" ", 1), words[1:]
    return ", ".join([f"{first[0]} of a step was {first[1]}", *rest])


def _train(source: Mapping[str, Any]) -> str:
    facts, status, why = source["facts"], Status(source["status"]), source["why"]
    model, task = facts.get("model"), _task(source)
    what = f"{model or 'a model'} on {task}" if task else f"{model or 'a model'}"
    place = _place(facts, source.get("workers", ""), source.get("batch", ""))
    said = f"{source['name']} "
    if status.good:
        said += f"trained {what}{place}{_outcome(source)}"
        said += _ENDS.get(status, ".")
    elif status == Status.RUNNING:
        said += f"is training {what}{place}: {_progress(source)}."
    elif status in (Status.FAILED, Status.DIVERGED, Status.INTERRUPTED):
        verb = "was interrupted" if status == Status.INTERRUPTED else status
        reason = why.removeprefix(f"{status}: ").rstrip(".")
        said += f"{verb} {_how_far(source)}" + (f": {reason}." if reason else ".") + f" It was set to train {what}{place}."
    elif status == Status.CUT_SHORT:
        said += f"was cut short {_how_far(source)}, for an unknown reason. It was set to train {what}{place}."
    else:
        said += f"ended with status {source['status']}{_outcome(source)}."
    where = shares(source["where"]["components_s"]) if source.get("where") else ""
    return f"{said} {where}." if where else said


def _task(source: Mapping[str, Any]) -> Any:
    return source["facts"].get("task") or source["environment"].get("task")


def _place(facts: Mapping[str, Any], joined: str, growing: str) -> str:
    workers, parts, batch = (facts.get(name, "") for name in ("workers", "virtual_workers", "global_batch"))
    inner = [f"V = {parts:,.0f}"] if _is_number(parts) else []
    inner += [f"global batch {growing or f'{batch:,.0f}'}"] if growing or _is_number(batch) else []
    said = f" with {f'{joined} workers' if joined else plural(workers, 'worker')}" if _is_number(workers) else ""
    return said + (f" ({', '.join(inner)})" if inner else "")


def _outcome(source: Mapping[str, Any]) -> str:
    last, facts = source["last"], source["facts"]
    name = "accuracy" if last.get("accuracy") is not None else "loss"
    words = [f" to {name} {figure(last[name])}"] if last.get(name) is not None else []
    epochs = last.get("epochs")
    spent = [f" in {plural(epochs, 'epoch')}"] if epochs else []
    joins = source.get("joins") or []
    extra = f" plus {duration(sum(join['join_s'] for join in joins))} for {plural(len(joins), 'join')}" if joins else ""
    spent += [duration(last["time_s"]) + extra] if last.get("time_s") else []
    spent += [f"{rate(last['samples_per_s'])} {unit_of(facts)}/s"] if last.get("samples_per_s") else []
    return "".join(words) + (", ".join(spent) if words or not spent else f", {', '.join(spent).strip()}")


def _progress(source: Mapping[str, Any]) -> str:
    last, facts = source["last"], source["facts"]
    step, total, time_s = last.get("steps"), facts.get("total_steps"), last.get("time_s")
    if not step:
        return "no step has finished yet"
    words = [f"step {step:,.0f} of {total:,.0f}" if _is_number(total) else f"step {step:,.0f}"]
    if last.get("accuracy") is not None:
        words.append(f"accuracy {figure(last['accuracy'])} at the last validation")
    elif last.get("train_loss") is not None:
        words.append(f"loss {figure(last['train_loss'])} so far")
    if _is_number(total) and time_s and total > step and not source.get("batch"):  # the steps to come have the same size
        words.append(f"about {duration(time_s / step * (total - step))} left")
    return ", ".join(words)


def _how_far(source: Mapping[str, Any]) -> str:
    step, total = source["last"].get("steps"), source["facts"].get("total_steps")
    if not step:
        return "before its first step was recorded"
    return f"after {step:,.0f} of {total:,.0f} steps" if _is_number(total) else f"after {plural(step, 'step')}"


def _compared(runs: Sequence[Mapping[str, Any]]) -> str:
    """Several runs: the best, the fastest, and those that have not finished."""
    measured = [run for run in runs if any(run["last"].get(name) is not None for name in _RANKED)]
    tasks, units = {_task(run) for run in measured}, {unit_of(run["facts"]) for run in measured}
    unlike = " of different tasks" if len(tasks) > 1 else " with different units" if len(units) > 1 else ""
    said = [] if unlike else [*_best(runs), *_fastest(measured)]  # numbers of different tasks cannot be compared
    name = said[1].partition(" was fastest, ")[0] if len(said) == 2 else ""
    if name and said[0].startswith((f"{name} ended best, ", f"{name} is best so far, ")):
        said = [f"{said[0]}, and {said[1].removeprefix(f'{name} ')}"]
    for status, verb in ((Status.RUNNING, "still training"), *((each, each.value) for each in _UNFINISHED)):
        said += _named(runs, status, verb)
    silent, counted = "" if measured else ", none with a result", plural(len(runs), "run")
    if said and said[0].startswith((f"{counted} ended equal, ", f"{counted} are equal so far, ")):
        return "; ".join(said) + "."
    return f"{counted}{unlike}" + (": " + "; ".join(said) if said else silent) + "."


def _best(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which run of a task ended best, or is best so far. Runs that show the same number are equal."""
    for name, better in (("accuracy", max), ("loss", min)):
        found = [(run["last"][name], run["name"]) for run in runs if run["last"].get(name) is not None]
        if not found:
            continue
        value, best = better(found, key=lambda pair: pair[0])
        so_far = any(run["status"] == Status.RUNNING for run in runs if run["last"].get(name) is not None)
        equal = sum(figure(other) == figure(value) for other, _ in found)
        if len(found) == 1:
            return [f"{best} reached {name} {figure(value)}"]
        if equal == 1:
            return [f"{best} {'is best so far' if so_far else 'ended best'}, with {name} {figure(value)}"]
        how = "equal" if equal == len(found) else "equal and best"
        return [f"{plural(equal, 'run')} {f'are {how} so far' if so_far else f'ended {how}'}, at {name} {figure(value)}"]
    return []


def _fastest(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which run was fastest, if one was."""
    found = [(run["last"]["samples_per_s"], run["name"]) for run in runs if run["last"].get("samples_per_s")]
    if len(found) < 2:
        return []
    value, fastest = max(found)
    if sum(rate(other) == rate(value) for other, _ in found) > 1:
        return []
    return [f"{fastest} was fastest, with {rate(value)} {unit_of(runs[0]['facts'])}/s"]


def _named(runs: Sequence[Mapping[str, Any]], status: str, verb: str) -> list[str]:
    names = [run["name"] for run in runs if run["status"] == status]
    if not names:
        return []
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return [f"{verb}: {listed}"]


def _scale(source: Mapping[str, Any]) -> str:
    scale = source["scale"] or {}
    counts, unit = scale.get("counts") or [], scale.get("unit", "samples")
    about = f"{scale.get('task') or source['name']}" + (f", {scale['mode']} scaling" if scale.get("mode") else "")
    if not counts:
        return f"{about}: nothing was measured."
    first, last = counts[0], counts[-1]
    said = f"{about}: {plural(first['workers'], 'worker')} ran at {rate(first['samples_per_s'])} {unit}/s"
    if last is first:
        return said + "; scaling needs at least two worker counts."
    said += f", {plural(last['workers'], 'worker')} at {rate(last['samples_per_s'])}"
    speed_up = last["samples_per_s"] / first["samples_per_s"] if first["samples_per_s"] else None
    if speed_up:
        linear = last["workers"] / first["workers"]
        said += f": {speed_up:.2f} times as fast, {speed_up / linear:.0%} of linear"
    where = shares(last["components_s"])
    return f"{said}. With {plural(last['workers'], 'worker')}, {where}." if where else f"{said}."


def _study(source: Mapping[str, Any]) -> str:
    study = source["study"]
    if not study:
        return f"{source['name']} is a study with unreadable results."
    metric, arms = study["metric"], [arm for arm in study["arms"] if arm["mean"] is not None]
    of = f" of {study['planned']:,}" if study["planned"] and study["planned"] != study["ended"] else ""
    name, count = study["name"] or source["name"], plural(len(study["arms"]), "arm")
    said = f"{name} on {study['task']}: {count}, {study['ended']:,}{of} runs"
    if not arms:
        return said + ", no results yet."
    learning = source.get("learning")
    if learning and learning["sentence"]:
        return f"{said}. {learning['sentence']}"
    if study.get("mini"):
        return said + ". A trial with --mini: its numbers mean nothing."
    best = (max if metric == "accuracy" else min)(arms, key=lambda arm: arm["mean"])
    said += f". Best: {best['name']}, {metric} {best['spread']}"
    verdicts = Counter(arm["verdict"] for arm in study["arms"] if not arm["reference"])
    order = ("better", "equal", "no worse", "worse", "undecided", "no verdict")
    counted = ", ".join(f"{verdicts[name]} {name}" for name in order if verdicts[name])
    return said + (f". Compared with {study['reference']}: {counted}." if counted else ".")


def _toys(source: Mapping[str, Any]) -> str:
    """What the walks from the sharp minimum came to, at the setting where SGD and momentum differ most."""
    rows = [row for toy in source["toys"] or [] if toy["toy"] == "minima" for row in toy["rows"]]
    titles = ", ".join(toy["title"] for toy in source["toys"] or [] if toy["title"])
    said = f"{source['name']}: {titles or 'no toys'}."
    pairs = [
        (plain, heavy)
        for plain, heavy in pairwise(rows)
        if plain.get("optimizer") == "SGD" and heavy["row_lr"] == plain["row_lr"] and heavy["noise"] == plain["noise"]
    ]
    if not pairs:
        return said
    plain, heavy = max(pairs, key=lambda pair: abs(pair[0]["flat"] - pair[1]["flat"]))
    return (
        f"{said} With noise {plain['noise']:g} and learning rate {plain['row_lr']:g}, {plain['flat']:.1%} of"
        f" {plural(plain['seeds'], 'walk')} of SGD left the sharp minimum for the flat one, and {heavy['flat']:.1%} of those"
        " with momentum at the same lr/(1-mu)."
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
