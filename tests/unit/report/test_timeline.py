"""A timeline as bars: which share of an all-reduce the backward pass hides, per worker."""

from typing import Any

from paceline.report.timeline import view_timeline


def span(kind: str, start: float, took: float, worker: int = 0, **args: Any) -> dict[str, Any]:
    lane = 1 if kind == "communication" else 0
    return {
        "ph": "X",
        "name": kind,
        "cat": kind,
        "ts": start,
        "dur": took,
        "pid": worker,
        "tid": lane,
        "args": {"step": 7, **args},
    }


def bars(*events: Any) -> list[dict[str, Any]]:
    found = view_timeline({"traceEvents": list(events)}, [])
    assert found is not None
    return list(found["bars"])


def test_an_all_reduce_is_cut_where_its_workers_backward_pass_ends() -> None:
    found = bars(span("backward", 1000, 4000), span("communication", 4000, 3000, bucket=2, bytes=99))
    pieces = [(bar["kind"], bar["start_ms"], bar["took_ms"]) for bar in found if bar["lane"] == 1]
    assert pieces == [("hidden", 3, 1), ("exposed", 4, 2)]
    assert {bar.get("all_ms") for bar in found if bar["lane"] == 1} == {3}
    assert {bar.get("hidden_ms") for bar in found if bar["lane"] == 1} == {1}


def test_another_workers_backward_pass_hides_nothing() -> None:
    found = bars(span("backward", 0, 9000, worker=0), span("communication", 1000, 1000, worker=1))
    assert [bar["kind"] for bar in found if bar["worker"] == 1] == ["exposed"]


def test_steps_span_all_workers_and_times_begin_at_zero() -> None:
    found = view_timeline({"traceEvents": [span("forward", 5000, 100), span("forward", 5200, 800, worker=1)]}, [])
    assert found is not None
    assert found["steps"] == [{"step": 7, "start_ms": 0, "end_ms": 1}]
    assert found["workers"] == [0, 1]


def test_buckets_come_in_the_order_they_are_reduced() -> None:
    about = {"buckets": [{"bucket": 1, "bytes": 5}, {"bucket": 0, "parameters": ["w"]}, "x"]}
    found = view_timeline({"traceEvents": [span("forward", 0, 1)], "paceline": about}, [])
    assert found is not None
    assert [row["bucket"] for row in found["buckets"]] == [0, 1]
    assert found["buckets"][0]["parameters"] == ["w"]


def test_foreign_events_are_left_out_and_an_unusable_file_is_a_problem() -> None:
    assert len(bars(span("forward", 0, 1), None, {"ph": "X"}, {"ph": "X", "ts": "a", "dur": 1, "pid": 0}, {"ph": "M"})) == 1
    for broken in (None, [], {}, {"traceEvents": 3}, {"traceEvents": []}, {"traceEvents": [{"ph": "M"}]}):
        problems: list[str] = []
        assert view_timeline(broken, problems) is None
        assert problems


def test_many_workers_are_cut_to_what_can_be_read() -> None:
    found = view_timeline({"traceEvents": [span("forward", 0, 1, worker=rank) for rank in range(64)]}, [])
    assert found is not None
    assert (len(found["workers"]), found["left_out"]) == (16, 48)
