"""`paceline train --profile`: a timeline of a few steps over all workers, in Chrome's trace format, which Perfetto opens.

Each worker is one process in the trace. One line shows what it computes (input, forward, backward, optimizer). DDP's buckets
overlap, so each has its own line, from the moment its gradients are ready until they are averaged. The time before the worker's
last gradient is hidden behind the backward pass. The step waits for the rest: first for slower workers, until the last of them
has its gradients, then for communication. Steps replayed from a CUDA graph cannot be looked into; the steps of the timeline are
launched one by one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.output import plural
from paceline.training.build import Run
from paceline.training.timing.clock import COUNTS_AS, Clock, Timed

WARM_UP, STEPS = 10, 5
"""Steps before the timeline begins, and in it: DDP changes its buckets after the first step."""

_MOST_NAMES = 1000


class Profile:
    """Follows a few steps of a run."""

    def __init__(self, run: Run, clock: Clock, first: int, replayed: bool) -> None:
        """The run starts at step `first`; `replayed`: its other steps are replayed from a CUDA graph."""
        last = run.update.schedule.total_steps
        begin = min(first + WARM_UP, max(first, last - STEPS))
        self.steps = range(begin, min(begin + STEPS, last))
        self._clock, self._world = clock, run.world
        self._how = {"backend": run.world.backend, "reduce": run.config.reduce, "replayed": replayed}
        self._names = {parameter: name for name, parameter in run.model.named_parameters()}
        self._taken: list[Timed] = []

    def before(self, step: int) -> None:
        """A step is about to begin."""
        self._clock.follow_buckets(step in self.steps)

    def after(self, step: int, timed: Sequence[Timed]) -> dict[str, Any] | None:
        """`step` steps are done, and these were timed since the last look. Returns the timeline on rank 0, once it is complete.

        Collective: call on every rank.
        """
        self._taken += [each for each in timed if each.step in self.steps]
        if not self._taken or step < self.steps.stop:
            return None
        self._clock.follow_buckets(False)
        workers = self._world.gather([_plain(each, self._names) for each in self._taken])
        self._taken = []
        return make_timeline(workers, self._how) if self._world.is_main else None


def make_timeline(workers: Sequence[Sequence[Mapping[str, Any]]], how: Mapping[str, Any]) -> dict[str, Any]:
    """The trace of every worker's steps, and the times of each bucket.

    `how`: the backend, how gradients are reduced, and whether other steps are replayed from a CUDA graph.
    """
    origin = min(step["spans"][0][1] for steps in workers for step in steps)
    events: list[dict[str, Any]] = []
    for rank, steps in enumerate(workers):
        buckets = max(len(step["buckets"]) for step in steps)
        lines = ["computes", *(f"bucket {number}" for number in range(buckets))]
        ids = [line * len(workers) + rank for line in range(len(lines))]  # Perfetto merges lines with the same id
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": ids[0], "args": {"name": f"worker {rank}"}})
        for line, name in zip(ids, lines, strict=True):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": line, "args": {"name": name}})
        for number, step in enumerate(steps):
            latest = max(of_worker[number]["ready"] or 0.0 for of_worker in workers)
            for stage, begin, end in _cut(step, latest):
                events.append(_event((stage, stage), (begin - origin, end - origin), (rank, ids[0]), {"step": step["step"]}))
            for number, bucket in enumerate(step["buckets"]):
                about = {"step": step["step"], "bucket": number, "bytes": bucket["bytes"]}
                when = bucket["ready"] - origin, bucket["averaged"] - origin
                events.append(_event((f"all-reduce, bucket {number}", "communication"), when, (rank, ids[1 + number]), about))
    first = workers[0]
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "paceline": {
            "workers": len(workers),
            "steps": [step["step"] for step in first],
            **how,
            "buckets": _describe_buckets([step for steps in workers for step in steps]),
        },
    }


def describe_timeline(about: Mapping[str, Any]) -> list[str]:
    """One line per bucket, in the order in which they are averaged, and what else to know."""
    lines = ["these steps were launched one by one; the others are replayed from a CUDA graph"] if about["replayed"] else []
    if about["reduce"] == "exact" and about["workers"] > 1:
        lines.append("an exact sum has no buckets: it starts when the backward pass is over")
    for bucket in about["buckets"]:
        names, took_s = bucket["parameters"], bucket["took_s"]
        held = f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
        hidden = f", {bucket['hidden_s'] / took_s:.0%} of it hidden" if took_s else ""
        lines.append(
            f"bucket {bucket['bucket']}: {bucket['bytes'] / 2**20:.2f} MiB, {plural(len(names), 'tensor')} ({held}), ready"
            f" {1e3 * bucket['ready_s']:.2f} ms into the backward pass, averaged in {1e3 * took_s:.2f} ms{hidden}"
        )
    return lines


def _event(
    name: tuple[str, str], when: tuple[float, float], where: tuple[int, int], about: Mapping[str, Any]
) -> dict[str, Any]:
    begin, end = (round(moment * 1e9) for moment in when)  # whole ns, so that one event never ends after the next begins
    return {
        "ph": "X",
        "name": name[0],
        "cat": name[1],
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
        "pid": where[0],
        "tid": where[1],
        "args": dict(about),
    }


def _cut(step: Mapping[str, Any], latest: float) -> list[tuple[str, float, float]]:
    """The stages under their printed names. The backward pass ends with the last gradient. The rest of it is waiting, until the
    slowest worker has its gradients, and then communication.
    """
    found, ready = [], step["ready"]
    for stage, begin, end in step["spans"]:
        if ready is not None and begin <= ready <= end and stage in ("backward", "reduce"):
            together = min(max(latest, ready), end)
            found += [("backward", begin, ready), ("waiting", ready, together), ("communication", together, end)]
        else:
            found.append(("communication" if stage == "reduce" else COUNTS_AS[stage], begin, end))
    return [span for span in found if span[2] > span[1]]


def _describe_buckets(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each bucket: its tensors, when it is ready (from the start of the backward pass), its duration, how much is hidden.

    Buckets are those of the last step; steps with other buckets, as the first may have, are left out.
    """
    layout = _layout(steps[-1])
    steps = [step for step in steps if _layout(step) == layout]
    described = []
    for number, like in enumerate(steps[-1]["buckets"]):
        rows = []
        for step in steps:
            bucket, begin = step["buckets"][number], max(begin for stage, begin, _ in step["spans"] if stage == "backward")
            end = step["ready"] if step["ready"] is not None else bucket["ready"]
            hidden = max(0.0, min(bucket["averaged"], end) - bucket["ready"])
            rows.append((bucket["ready"] - begin, bucket["averaged"] - bucket["ready"], hidden))
        ready_s, took_s, hidden_s = (sum(column) / len(rows) for column in zip(*rows, strict=True))
        about = {"bucket": number, "bytes": like["bytes"], "parameters": like["parameters"]}
        described.append({**about, "ready_s": ready_s, "took_s": took_s, "hidden_s": hidden_s})
    return described


def _layout(step: Mapping[str, Any]) -> list[list[str]]:
    return [bucket["parameters"] for bucket in step["buckets"]]


def _plain(timed: Timed, names: Mapping[Any, str]) -> dict[str, Any]:
    """A step as JSON values, counted from 1 as in the record. The cargo, which carries the metrics, is named "(metrics)"."""
    buckets = [
        {
            "bytes": bucket["bytes"],
            "ready": bucket["ready"],
            "averaged": bucket.get("averaged", bucket["ready"]),
            "parameters": [names.get(parameter, "(metrics)") for parameter in bucket["parameters"]][:_MOST_NAMES],
        }
        for bucket in timed.buckets
    ]
    return {"step": timed.step + 1, "spans": timed.spans(), "ready": timed.gathered(), "buckets": buckets}
