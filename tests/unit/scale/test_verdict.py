"""The verdict at the end of `paceline scale`: it names the component of a step's time that grew."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.records import COMPONENTS
from paceline.scale import scale
from paceline.scale.scale import parse_counts
from paceline.scale.verdict import lost_s, table, verdict


def _count(workers: int, speed: float, devices: str = "4 x GPU", parts: int = 0, **components_s: float) -> dict[str, Any]:
    """A count with windows as fast as its timed steps; `speed` is the speed-up over one worker."""
    found = {**dict.fromkeys(COMPONENTS, 0.0), "compute": 0.010, **components_s}
    step_s = sum(found.values())
    waits = [{"components_s": {"waiting": 0.0 if rank == workers - 1 else 0.004}} for rank in range(workers)]
    return {
        "workers": workers,
        "virtual_workers": parts or workers,
        "global_batch": 128 * workers,
        "samples_per_s": 128 * workers / step_s,
        "low": 120 * workers / step_s,
        "high": 130 * workers / step_s,
        "windows": [1.0] * 7,
        "speed_up": speed,
        "efficiency": speed / workers,
        "step_s": step_s,
        "components_s": found,
        "by_worker": waits,
        "contract": {"devices": devices},
    }


def _verdict(*counts: dict[str, Any], mode: str = "weak") -> str:
    return verdict({"unit": "images", "mode": mode, "counts": list(counts)})


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (_count(4, 3.9), "4 workers are 3.90 times as fast as 1 worker (98% of linear): try more workers."),
        (
            _count(4, 2.0, communication=0.009),
            "communication that does not overlap with compute (9.0 ms per step): give each worker",
        ),
        (_count(4, 2.0, input=0.009), "waiting for input (9.0 ms per step): use more --loader-workers"),
        (_count(4, 2.0, waiting=0.003), "waiting for slower workers (3.0 ms per step): the others wait for worker 3"),
        (_count(4, 2.0, waiting=0.003, parts=6), "6 parts cannot be dealt evenly to 4 workers"),
        (_count(4, 2.0, "4 CPU workers (2 cores)", compute=0.02), "(10.0 ms per step): there are more workers than cores"),
        (_count(4, 2.0, "4 CPU workers (4 cores)", compute=0.02), "(10.0 ms per step): CPU workers share caches and memory"),
        (_count(4, 2.0, compute=0.02), "(10.0 ms per step): each device is slower next to the others"),
        (_count(4, 2.0), "but no component of a step grew"),
        (_count(4, 2.0, other=0.02), "time between steps (20.0 ms per step): this is Python between two steps"),
        (_count(4, 3.9, input=0.004), "but 29% of every step is waiting for input"),
    ],
)
def test_it_names_what_is_lost(last: dict[str, Any], says: str) -> None:
    first = _count(1, 1.0, input=last["components_s"]["input"] if "every step" in says else 0.0)
    assert says in _verdict(first, last)


def test_one_count() -> None:
    assert _verdict(_count(2, 1.9)) == "2 workers train 25,600 images/s, and compute is 100% of a step: measure more workers."
    assert "but 47% of a step is waiting for input" in _verdict(_count(2, 1.9, input=0.009))


def test_jitter_is_not_blamed_on_one_worker() -> None:
    last = _count(4, 2.0, waiting=0.003)
    last["by_worker"] = [{"components_s": {"waiting": wait}} for wait in (0.003, 0.0028, 0.0035, 0.0032)]
    assert "a different worker is slow in each step" in _verdict(_count(1, 1.0), last)


def test_strong_scaling_expects_less_of_each_worker() -> None:
    first, last = _count(1, 1.0), {**_count(4, 2.0, compute=0.004), "global_batch": 128, "samples_per_s": 128 / 0.004}
    assert lost_s(first, last)["compute"] == pytest.approx(0.0015)
    assert "smaller parts use the device less well" in _verdict(first, last, mode="strong")


def test_a_faster_link_is_suggested_only_for_several_nodes() -> None:
    last = _count(4, 2.0, communication=0.009)
    assert "faster link" not in _verdict(_count(1, 1.0), last)
    assert "or connect the nodes by a faster link" in _verdict(_count(1, 1.0), {**last, "nodes": 2})


def test_components_are_scaled_to_the_step_time_of_the_windows() -> None:
    """The timed steps were slow for a moment: the losses are those of the windows."""
    last = _count(4, 2.0, communication=0.009)
    slow = {
        **last,
        "step_s": 2 * last["step_s"],
        "components_s": {name: 2 * value for name, value in last["components_s"].items()},
    }
    assert lost_s(_count(1, 1.0), slow) == pytest.approx(lost_s(_count(1, 1.0), last))


def test_the_table_has_every_count_and_component() -> None:
    text = table({"unit": "images", "mode": "weak", "counts": [_count(1, 1.0), _count(2, 1.5, communication=0.01)]})
    assert all(name in text for name in COMPONENTS)
    assert "1.50" in text
    assert "10.00 (50%)" in text
    assert "medians of 7 windows" in text
    assert "up to" not in text, "windows are as fast as timed steps"
    assert "the fewest measured" not in text


@pytest.mark.parametrize(("factor", "says"), [(1.5, "up to 50% longer"), (0.6, "up to 40% longer or"), (1.01, "timed steps;")])
def test_the_table_notes_timed_steps_that_differ_from_the_windows(factor: float, says: str) -> None:
    count = _count(2, 2.0)
    text = table({"unit": "images", "mode": "weak", "counts": [{**count, "step_s": factor * count["step_s"]}]})
    assert says in text
    assert text.endswith("linear is relative to 2 workers, the fewest measured")


def _measured(**contract: Any) -> dict[str, Any]:
    usual = {"model": "linear", "part_batch": 128, "global_batch": 256, "virtual_workers": 2, "precision": "fp32"}
    return {"threads": contract.pop("threads", 1), "contract": {**usual, **contract}}


@pytest.mark.parametrize(
    ("mode", "other", "says"),
    [
        ("weak", {"model": "mlp"}, "runs/s was measured with model linear, but this run has mlp: choose another --name"),
        ("weak", {"part_batch": 64}, "part batch 128, but this run has 64"),
        ("weak", {"threads": 2}, "threads 1, but this run has 2"),
        ("weak", {"global_batch": 512, "virtual_workers": 4}, ""),
        ("strong", {"global_batch": 384}, "global batch 256, but this run has 384"),
        ("strong", {"part_batch": 64}, ""),
    ],
)
def test_counts_of_one_record_differ_only_in_workers(mode: str, other: dict[str, Any], says: str) -> None:
    if not says:
        scale._check_alike(Path("runs/s"), mode, _measured(), _measured(**other))
        return
    with pytest.raises(UsageError, match=re.escape(says)):
        scale._check_alike(Path("runs/s"), mode, _measured(), _measured(**other))


def test_a_continued_record_keeps_its_threads_and_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "core_count", lambda: 4)
    here, found = Path("runs/s"), {"counts": [{"threads": 2, "virtual_workers": 6, "global_batch": 384}]}
    assert scale._threads(2, {}, here) == 2
    assert scale._threads(3, {}, here) == 1
    assert scale._threads(1, found, here) == 2, "not four: the other counts had two"
    with pytest.raises(UsageError, match="measured workers of 2 threads each, too many for 3 workers on 4 cores"):
        scale._threads(3, found, here)
    assert scale._threads(9, {"counts": [{"threads": 1}]}, here) == 1
    assert scale._mode_options({}, "strong", 3, found) == {"virtual_workers": 6, "global_batch": 384}
    assert scale._mode_options({}, "strong", 3, {}) == {"virtual_workers": 3, "global_batch": 384}
    assert scale._mode_options({"virtual_workers": 2}, "strong", 2, found)["virtual_workers"] == 2


def test_training_options_of_a_recipe_are_dropped() -> None:
    recipe = {"model": "cnn", "global_batch": 512, "reference_batch": 256, "target_accuracy": 0.94}
    assert scale._of_recipe(recipe, "weak") == {"model": "cnn", "reference_batch": 256}
    assert scale._of_recipe(recipe, "strong") == {"model": "cnn", "global_batch": 512, "reference_batch": 256}


def test_counts() -> None:
    assert parse_counts("4,1,2,2") == [1, 2, 4]
    assert parse_counts("") == []


def test_the_progress_bar_is_only_for_terminals(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with scale._bar([1, 2]) as counts:
        assert list(counts) == [1, 2]
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        with scale._bar([1, 2]) as counts:
            for _ in counts:
                print("a line", flush=True)
        os.write(theirs, b"end")  # so that there is something to read in any case
        shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "counts measured" in shown
    assert "0/2" in shown
    assert "a line" not in shown
    assert capfd.readouterr() == ("a line\na line\n", ""), "stdout is not a terminal: it still gets the lines"
