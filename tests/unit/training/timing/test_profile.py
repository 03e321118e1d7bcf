"""The trace of steps whose times are known, and what is said of it."""

import itertools
from typing import Any

from paceline.training.timing.profile import describe_timeline, make_timeline

HOW = {"backend": "gloo", "reduce": "fast", "replayed": False}


def _step(ready: float, *spans: tuple[str, float, float], buckets: Any = ()) -> dict[str, Any]:
    return {"step": 11, "spans": spans, "ready": ready, "buckets": list(buckets)}


def _lines(timeline: dict[str, Any], rank: int, line: int = 0) -> list[tuple[str, float, float]]:
    tid = line * timeline["paceline"]["workers"] + rank
    events = [event for event in timeline["traceEvents"] if (event["ph"], event["pid"], event["tid"]) == ("X", rank, tid)]
    return [(event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in events]


def test_what_follows_the_last_gradient_is_waiting_and_then_communication() -> None:
    """Worker 0 is ready at 5 s, worker 1 at 8 s; both have the average at 10 s. Times count from the first stamp, 1 s."""
    workers = [[_step(ready, ("forward", 1.0, 3.0), ("backward", 3.0, 10.0))] for ready in (5.0, 8.0)]
    timeline = make_timeline(workers, HOW)
    assert _lines(timeline, 0) == [("forward", 0, 2), ("backward", 2, 4), ("waiting", 4, 7), ("communication", 7, 9)]
    assert _lines(timeline, 1) == [("forward", 0, 2), ("backward", 2, 7), ("communication", 7, 9)]


def test_an_exact_sum_is_waited_for_in_its_own_phase() -> None:
    workers = [[_step(ready, ("backward", 0.0, ready), ("reduce", ready, 10.0))] for ready in (4.0, 6.0)]
    timeline = make_timeline(workers, {**HOW, "reduce": "exact"})
    assert _lines(timeline, 0) == [("backward", 0, 4), ("waiting", 4, 6), ("communication", 6, 10)]
    assert describe_timeline(timeline["paceline"]) == ["an exact sum has no buckets: it starts when the backward pass is over"]


def test_buckets_and_how_much_of_them_is_hidden() -> None:
    """The first is averaged from 2 to 6 s, and the last gradient comes at 5 s: three of its four seconds are hidden."""
    about = {"bytes": 1 << 20, "parameters": ["b", "a"]}
    buckets = [{**about, "ready": 2.0, "averaged": 6.0}, {**about, "ready": 5.0, "averaged": 7.0}]
    timeline = make_timeline([[_step(5.0, ("backward", 1.0, 7.0), buckets=buckets)]], {**HOW, "replayed": True})
    first, second = timeline["paceline"]["buckets"]
    assert (first["ready_s"], first["took_s"], first["hidden_s"]) == (1, 4, 3)
    assert (second["ready_s"], second["took_s"], second["hidden_s"]) == (4, 2, 0)
    assert _lines(timeline, 0, 1) == [("all-reduce, bucket 0", 1, 5)]
    assert _lines(timeline, 0, 2) == [("all-reduce, bucket 1", 4, 6)], "a line of its own: they overlap"
    said = describe_timeline(timeline["paceline"])
    assert said[0].startswith("these steps were launched one by one")
    assert "bucket 0: 1.00 MiB, 2 tensors (b to a), ready 1000.00 ms" in said[1]
    assert "75% of it hidden" in said[1]


def test_buckets_are_those_of_the_last_step() -> None:
    """DDP rebuilds its buckets after the first step, in the order in which gradients came: here one became two."""
    whole = {"bytes": 8, "parameters": ["a", "b"], "ready": 9.0, "averaged": 10.0}
    halves = [
        {"bytes": 4, "parameters": ["b"], "ready": 13.0, "averaged": 14.0},
        {"bytes": 4, "parameters": ["a"], "ready": 15.0, "averaged": 18.0},
    ]
    steps = [_step(9.0, ("backward", 0.0, 10.0), buckets=[whole]), _step(15.0, ("backward", 10.0, 20.0), buckets=halves)]
    for workers in ([steps], [steps[::-1]]):
        timeline = make_timeline(workers, HOW)
        described = [(bucket["parameters"], bucket["took_s"]) for bucket in timeline["paceline"]["buckets"]]
        last = [(bucket["parameters"], bucket["averaged"] - bucket["ready"]) for bucket in workers[0][-1]["buckets"]]
        assert described == last
        assert _lines(timeline, 0, 2) == [("all-reduce, bucket 1", 15, 18)]


def test_where_one_thing_ends_the_next_begins_to_the_nanosecond() -> None:
    """Perfetto leaves out what overlaps on a line, were it by one."""
    moments = [i / 7 + i * i / 3e5 for i in range(1000)]
    spans = [("forward", begin, end) for begin, end in itertools.pairwise(moments)]
    events = [event for event in make_timeline([[_step(1e6, *spans)]], HOW)["traceEvents"] if event["ph"] == "X"]
    for before, after in itertools.pairwise(events):
        assert round(before["ts"] * 1e3) + round(before["dur"] * 1e3) == round(after["ts"] * 1e3)
