"""The sentence at the top: honest for every way a run can end."""

import math
from typing import Any

import pytest

from paceline.output import plural
from paceline.report.summary import duration, figure, headline, rate, shares, summarize, tone


def train(name: str = "demo", status: str = "done", **changes: Any) -> dict[str, Any]:
    facts = {
        "model": "cnn",
        "task": "fashion-mnist-mini",
        "workers": 2,
        "virtual_workers": 4,
        "global_batch": 256,
        "total_steps": 120,
    }
    last = {
        "accuracy": 0.882,
        "loss": 0.4,
        "epochs": 5,
        "steps": 120,
        "time_s": 3.8,
        "samples_per_s": 7861.2,
        "train_loss": 0.3,
    }
    source = {
        **{"id": name, "name": name, "kind": "train", "status": status, "why": "", "facts": facts, "last": last},
        **{"environment": {}, "where": None, "scale": None, "study": None},
        **changes,
    }
    return source | {"summary": summarize(source)}


def test_a_finished_run() -> None:
    where = {"components_s": {"compute": 0.82, "communication": 0.11, "other": 0.04, "input": 0.03}}
    assert train(where=where)["summary"] == (
        "demo trained cnn on fashion-mnist-mini with 2 workers (V = 4, global batch 256) to accuracy 0.8820 in 5 epochs, 3.8 s,"
        " 7,861 images/s. 82% of a step was compute, 11% communication."
    )


def test_a_run_that_reached_its_target_says_so() -> None:
    assert train(status="target reached")["summary"].endswith("7,861 images/s, and reached its target.")
    assert train(status="stopped early")["summary"].endswith(
        "7,861 images/s, and stopped early, because it no longer improved."
    )


def test_a_running_run_says_where_it_is_and_what_is_left() -> None:
    last = {"steps": 40, "time_s": 4.0, "train_loss": 0.5}
    said = train(status="running", last=last)["summary"]
    assert "is training cnn" in said
    assert said.endswith("step 40 of 120, loss 0.5000 so far, about 8.0 s left.")
    assert train(status="running", last={})["summary"].endswith("no step has finished yet.")


def test_a_run_that_did_not_end_well_says_why_and_where() -> None:
    said = train(status="diverged", why="diverged: the loss is nan at step 7", last={"steps": 6})["summary"]
    assert said.startswith("demo diverged after 6 of 120 steps: the loss is nan at step 7. It was set to train cnn")
    assert "failed before its first step was recorded: no disk." in train(status="failed", why="no disk.", last={})["summary"]
    assert "was interrupted after 6 of 120 steps." in train(status="interrupted", last={"steps": 6})["summary"]
    assert (
        "was cut short after 6 steps, for an unknown reason"
        in train(status="cut short", last={"steps": 6}, facts={})["summary"]
    )


def test_a_task_of_unknown_unit_has_samples() -> None:
    said = train(facts={"task": "my_task.py"})["summary"]
    assert said == "demo trained a model on my_task.py to accuracy 0.8820 in 5 epochs, 3.8 s, 7,861 samples/s."


def test_samples_are_called_what_the_contract_says() -> None:
    windows = train("a", facts={"task": "fashion-mnist", "unit": "windows"})
    assert windows["summary"].endswith("7,861 windows/s.")
    slow = train("b", facts=windows["facts"], last={"accuracy": 0.9, "samples_per_s": 1})
    assert "a was fastest, with 7,861 windows/s" in headline([windows, slow])


def test_several_runs_name_the_best_the_fastest_and_the_failed() -> None:
    slow = train("slow", last={"accuracy": 0.9, "samples_per_s": 10.0})
    fast = train("fast", last={"accuracy": 0.8, "samples_per_s": 200.0})
    lost = train("lost", status="diverged", last={})
    assert headline([slow, fast, lost]) == (
        "3 runs: slow ended best, with accuracy 0.9000; fast was fastest, with 200 images/s; diverged: lost."
    )
    assert "fast ended best, with accuracy 0.8000, and was fastest" in headline(
        [fast, train("x", last={"accuracy": 0.1, "samples_per_s": 1})]
    )
    assert headline([lost, train("gone", status="cut short", last={})]) == "2 runs: diverged: lost; cut short: gone."


def test_runs_that_ended_equal_have_no_best() -> None:
    runs = [train(name, last={"accuracy": 0.9, "samples_per_s": 200.0}) for name in "ab"]
    assert headline(runs) == "2 runs ended equal, at accuracy 0.9000."
    other = train("c", last={"accuracy": 0.8, "samples_per_s": 300.0})
    assert headline([*runs, other]) == (
        "3 runs: 2 runs ended equal and best, at accuracy 0.9000; c was fastest, with 300 images/s."
    )


def test_nothing_has_ended_best_while_a_run_trains() -> None:
    live = train("live", status="running", last={"accuracy": 0.9, "steps": 1})
    assert headline([live, train("x", last={"accuracy": 0.1})]) == (
        "2 runs: live is best so far, with accuracy 0.9000; still training: live."
    )
    equal = headline([live, train("x", last={"accuracy": 0.9})])
    assert equal == "2 runs are equal so far, at accuracy 0.9000; still training: live."


def test_runs_of_different_tasks_or_units_are_not_ranked() -> None:
    one, other = train("a"), train("b", facts={"task": "my_task.py"}, last={"loss": 0.1, "samples_per_s": 1e6})
    assert headline([one, other]) == "2 runs of different tasks."
    windows = train("b", facts={**one["facts"], "unit": "windows"}, status="diverged")
    assert headline([one, windows]) == "2 runs with different units: diverged: b."
    silent = train("c", facts={}, last={})
    assert "a ended best" in headline([one, train("b", last={"accuracy": 0.1}), silent])


def test_the_best_run_may_have_spaces_in_its_name() -> None:
    said = headline([train("the best", last={"accuracy": 0.9, "samples_per_s": 9.0}), train("x", last={"accuracy": 0.1})])
    assert said == "2 runs: the best ended best, with accuracy 0.9000."
    slow = train("x", last={"accuracy": 0.1, "samples_per_s": 1.0})
    said = headline([train("the best", last={"accuracy": 0.9, "samples_per_s": 9.0}), slow])
    assert said == "2 runs: the best ended best, with accuracy 0.9000, and was fastest, with 9 images/s."


def test_small_and_large_losses_keep_their_digits() -> None:
    assert [figure(value) for value in (0.0, 0.001, 0.88, 9999.0)] == ["0.0000", "0.0010", "0.8800", "9999.0000"]
    assert [figure(value) for value in (0.00012345, 3.2e-9, 12345.6)] == ["0.0001234", "3.2e-09", "1.235e+04"]
    assert "to loss 3.2e-06 in" in train(last={"loss": 3.2e-6, "epochs": 5})["summary"]
    assert "loss 3.2e-06 so far" in train(status="running", last={"steps": 1, "train_loss": 3.2e-6})["summary"]
    assert "b ended best, with loss 1e-05" in headline([train("a", last={"loss": 2e-5}), train("b", last={"loss": 1e-5})])


def test_without_accuracy_the_lowest_loss_is_best() -> None:
    assert "b ended best, with loss 0.1000" in headline([train("a", last={"loss": 0.2}), train("b", last={"loss": 0.1})])


def test_scaling_in_a_sentence() -> None:
    counts = [
        {"workers": 1, "samples_per_s": 100.0, "speed_up": 1.0, "components_s": {}},
        {"workers": 4, "samples_per_s": 300.0, "speed_up": 3.0, "components_s": {"compute": 3.0, "waiting": 1.0}},
    ]
    source = train(kind="scale", scale={"task": "t", "mode": "weak", "unit": "images", "counts": counts})
    assert source["summary"] == (
        "t, weak scaling: 1 worker ran at 100 images/s, 4 workers at 300: 3.00 times as fast, 75% of linear."
        " With 4 workers, 75% of a step was compute, 25% waiting."
    )
    assert "nothing was measured" in train(kind="scale", scale={"counts": []})["summary"]
    assert "at least two worker counts" in train(kind="scale", scale={"counts": counts[:1]})["summary"]
    from_two = [{**counts[0], "workers": 2, "speed_up": 2.0}, {**counts[1], "samples_per_s": 180.0, "speed_up": 3.6}]
    assert "1.80 times as fast, 90% of linear" in train(kind="scale", scale={"counts": from_two})["summary"]


def test_no_time_has_a_60th_second_or_minute() -> None:
    assert [duration(s) for s in (59.94, 59.96, 119.6, 3571, 3599.6, 7199)] == [
        *("59.9 s", "1 min", "2 min"),
        *("59 min 31 s", "1 h", "2 h"),
    ]


def test_words_for_numbers() -> None:
    assert [duration(s) for s in (0.0123, 3.84, 75, 3599.9, 7500, 3600)] == [
        "12 ms",
        "3.8 s",
        "1 min 15 s",
        "1 h",
        "2 h 5 min",
        "1 h",
    ]
    assert (rate(7861.4), rate(12.345)) == ("7,861", "12.3")
    assert (plural(1, "worker"), plural(2000, "worker")) == ("1 worker", "2,000 workers")
    assert shares({"compute": 0.0}) == ""
    assert shares({"input": 0.98, "other": 0.02}) == "98% of a step was input"


@pytest.mark.parametrize(
    ("status", "expected"), [("done", "good"), ("running", "live"), ("failed", "bad"), ("cut short", "plain"), ("<b>", "plain")]
)
def test_tones(status: str, expected: str) -> None:
    assert tone(status) == expected


def test_facts_of_the_wrong_type_are_ignored() -> None:
    assert (
        "trained"
        in train(facts={"workers": "two", "virtual_workers": None, "global_batch": math.nan, "total_steps": []})["summary"]
    )
