"""The sentence at the end of `paceline scale`: it names the part that grew."""

from typing import Any

import pytest

from paceline.measure.advice import PARTS, advise_scale, lost_s, table
from paceline.measure.scale import parse_counts


def _count(workers: int, speed: float, devices: str = "4 x GPU", parts: int = 0, **parts_s: float) -> dict[str, Any]:
    found = {**dict.fromkeys(PARTS, 0.0), "compute": 0.010, **parts_s}
    waits = [{"parts_s": {"waiting": 0.0 if rank == workers - 1 else 0.004}} for rank in range(workers)]
    return {
        "workers": workers,
        "virtual_workers": parts or workers,
        "global_batch": 128 * workers,
        "samples_per_s": speed * 1000,
        "low": speed * 990,
        "high": speed * 1010,
        "windows": [1.0] * 7,
        "speed_up": speed,
        "efficiency": speed / workers,
        "step_s": sum(found.values()),
        "parts_s": found,
        "by_worker": waits,
        "contract": {"devices": devices},
    }


def _advice(*counts: dict[str, Any]) -> str:
    return advise_scale({"unit": "images", "mode": "weak", "counts": list(counts)})


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (_count(4, 3.9), "4 workers are 3.90 times as fast as 1 worker (98% of linear): more of them are worth trying."),
        (
            _count(4, 2.0, communication=0.009),
            "communication that nothing hides (9.0 ms a step): give each worker",
        ),
        (_count(4, 2.0, input=0.009), "waiting for input (9.0 ms a step): use more --loader-workers"),
        (_count(4, 2.0, waiting=0.003), "waiting for slower workers (3.0 ms a step): worker 3 is the one"),
        (_count(4, 2.0, waiting=0.003, parts=6), "6 parts cannot be dealt evenly to 4 workers"),
        (_count(4, 2.0, "4 CPU workers", compute=0.02), "slower compute (10.0 ms a step): CPU workers share cores"),
        (_count(4, 3.9, input=0.004), "but 29% of every step is waiting for input"),
    ],
)
def test_it_names_what_is_lost(last: dict[str, Any], says: str) -> None:
    first = _count(1, 1.0, input=last["parts_s"]["input"] if "every step" in says else 0.0)
    assert says in _advice(first, last)


def test_one_count() -> None:
    assert _advice(_count(2, 1.9)) == "2 workers make 1,900 images/s, and compute is 100% of a step: measure more workers."
    assert "but 47% of a step is waiting for input" in _advice(_count(2, 1.9, input=0.009))


def test_jitter_is_nobodys_fault() -> None:
    last = _count(4, 2.0, waiting=0.003)
    last["by_worker"] = [{"parts_s": {"waiting": wait}} for wait in (0.003, 0.0028, 0.0035, 0.0032)]
    assert "now this one and now that one" in _advice(_count(1, 1.0), last)


def test_strong_scaling_expects_less_of_each_worker() -> None:
    first, last = _count(1, 1.0), {**_count(4, 2.0, compute=0.004), "global_batch": 128}
    assert lost_s(first, last)["compute"] == pytest.approx(0.0015)


def test_the_table_has_every_count_and_part() -> None:
    text = table({"unit": "images", "mode": "weak", "counts": [_count(1, 1.0), _count(2, 1.5, communication=0.01)]})
    assert all(name in text for name in PARTS)
    assert "1.50" in text
    assert "10.00 (50%)" in text
    assert "medians of 7 windows" in text
    assert "took up to" not in text, "the second count's windows are as fast as its timed steps"


def test_counts() -> None:
    assert parse_counts("4,1,2,2") == [1, 2, 4]
    assert parse_counts("") == []
