"""What a learning curve says: errors of the best epochs, failed seeds, what cannot be fitted, the check and the predictions."""

import json
import math

import pytest

from paceline.files import finite
from paceline.learning_curve.outcome import make_outcome, words

SIZES = (1000, 2000, 4000, 8000, 16000, 32000)


def made(errors, *, metric="accuracy", sizes=SIZES, bad=()):
    """Results of a study with these errors per size and seed; `bad`: the (size, seed) of runs that diverged."""
    runs = []
    for size, values in zip(sizes, errors, strict=True):
        for seed, error in enumerate(values):
            lost = (size, seed) in bad
            last = {"accuracy": 1 - error - 0.01, "loss": 9.0} if metric == "accuracy" else {"loss": error + 0.5}
            series = {"val_accuracy": [0.1, None, 1 - error, last["accuracy"]]} if metric == "accuracy" else {}
            about = {"status": "diverged" if lost else "done", "metrics": {} if lost else last, "steps": 100}
            runs.append({"arm": f"{size} samples", "seed": seed, **about, **series, "val_loss": [math.nan, error, error + 0.5]})
    arms = {f"{size} samples": {"about": "", "options": {"epochs": 5, "global_batch": 64}} for size in sizes}
    return {"study": {"arms": arms, "task": "t", "seeds": [0, 1, 2]}, "metric": metric, "runs": runs}


def power_law(a=8.0, b=-0.5, c=0.05, sizes=SIZES):
    return [[(a * m**b + c) * (1 + sign * 0.004) for sign in (-1, 0.3, 0.9)] for m in sizes]


def test_the_best_epoch_counts_and_the_fit_is_told():
    found = make_outcome(made(power_law()), SIZES, chance=0.9, target=0.06)
    assert found["sizes"][0]["errors"][0] == pytest.approx((8 / 1000**0.5 + 0.05) * 0.996, abs=1e-6)
    assert (found["metric"], found["sizes"][0]["failed"], found["sizes"][0]["steps"]) == ("error", 0, 100)
    assert found["fit"]["b"]["value"] == pytest.approx(-0.5, abs=0.02)
    assert [row["samples"] for row in found["predictions"]] == [64_000, 128_000]
    assert found["predictions"][0]["low"] < 8 / 64_000**0.5 + 0.05 < found["predictions"][0]["high"]
    assert [(row["samples"], row["inside"]) for row in found["check"]["sizes"]] == [(16_000, True), (32_000, True)]
    text = words(found)
    assert "1,000 0.3031 ± 0.0012 (3) 5 100 64 0" in " ".join(text.split())
    assert "check: a fit up to 8,000 samples, against the larger sizes" in text
    assert "all measured errors are inside the intervals" in text
    assert "2 times the data, 64,000 samples: 0.08" in text
    assert "error 0.06 would need about" in text
    assert "left out" not in text
    json.dumps(finite(found), allow_nan=False)


def test_a_prediction_that_missed_is_told():
    errors = power_law()
    errors[-1] = [0.2, 0.201, 0.2]
    text = words(make_outcome(made(errors), SIZES))
    assert "measured 0.2003: OUTSIDE" in text
    assert "1 of 2 predictions missed: do not trust those below further than these" in text


def test_a_task_without_accuracy_is_fitted_by_loss():
    found = make_outcome(made(power_law(), metric="loss"), SIZES, chance=0.9)
    assert found["metric"] == "loss"
    assert found["sizes"][0]["errors"][0] == pytest.approx((8 / 1000**0.5 + 0.05) * 0.996, abs=1e-6)
    assert "loss: the validation loss, of the best epoch of each run" in words(found)


def test_diverged_seeds_are_counted_and_left_out():
    bad = [(1000, 0), *((2000, seed) for seed in range(3))]
    found = make_outcome(made(power_law(), bad=bad), SIZES)
    assert [row["failed"] for row in found["sizes"]] == [1, 3, 0, 0, 0, 0]
    assert len(found["sizes"][0]["errors"]) == 2
    assert found["sizes"][1]["dropped"] == "no run finished"
    assert found["fit"]["b"]["value"] == pytest.approx(-0.5, abs=0.03)
    assert "left out of the fit: 2,000 samples: no run finished" in words(found)
    nothing = make_outcome(made(power_law(), bad=[(size, seed) for size in SIZES for seed in range(3)]), SIZES)
    assert "no fit: three parameters need 3 sizes" in words(nothing)


def test_what_cannot_be_fitted_is_told():
    flat = make_outcome(made([[0.3, 0.3, 0.3]] * 6), SIZES)
    assert "no fit: the error does not fall with more data" in words(flat)
    nothing_left = make_outcome(made([*power_law()[:2], *[[0.0] * 3] * 4]), SIZES)
    assert "4,000 samples: its error is 0" in words(nothing_left)
    assert nothing_left["fit"] is None


def test_few_sizes_have_no_check_and_one_seed_no_intervals():
    few = make_outcome(made([row[:1] for row in power_law()[:3]], sizes=SIZES[:3]), SIZES[:3], target=0.1)
    text = words(few)
    assert "no intervals: one seed and three sizes leave nothing to measure the spread with" in text
    assert "no check: needs 3 sizes up to a quarter of the largest, and there are 1" in text
    assert "90%" not in text
    assert "nan" not in text


def test_an_error_that_is_out_of_reach():
    text = words(make_outcome(made(power_law()), SIZES, target=0.02))
    assert "error 0.02 is out of reach of more data alone: the curve levels off at 0.05" in text
    unknown = make_outcome(made(power_law(3.0, -0.3, 0.0, SIZES[:4]), sizes=SIZES[:4]), SIZES[:4])
    assert "these sizes cannot show whether the curve levels off: c may be 0" in words(unknown)


def test_sizes_near_chance_are_left_out_and_told():
    text = words(make_outcome(made([[0.88, 0.9, 0.89], *power_law()[1:]]), SIZES, chance=0.9))
    assert "left out of the fit: 1,000 samples: error 0.8900 is near chance, 0.9000" in text
