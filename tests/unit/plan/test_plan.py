import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError, RecordError, UsageError
from paceline.plan.plan import Request, conclude, make_plan, plan_verb

Make = Callable[..., Path]


def row(record: Path, workers: int, cluster: str = "gigabit-lab", **flags: Any) -> dict[str, Any]:
    return make_plan(Request(record=str(record), cluster=cluster, workers=str(workers), **flags)).rows[0]


def test_the_verb_shows_a_table_and_what_it_means(make_scale: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert plan_verb(record=str(make_scale()), cluster="aws-p5", speed=30.0, json=str(out)) == 0
    said = capsys.readouterr().out
    assert "4,096" in said
    assert "Returns " in said
    assert "USD" in said
    assert "What accuracy such batches reach is not known: paceline rehearse" in said
    written = json.loads(out.read_text())
    assert [each["workers"] for each in written["rows"]] == [1 << i for i in range(13)]
    assert all(each["low"] <= each["samples_per_s"] <= each["high"] for each in written["rows"])
    assert written["cluster"]["source"]


def test_one_worker_reproduces_the_record(make_scale: Make) -> None:
    assert row(make_scale(), 1)["samples_per_s"] == pytest.approx(128 / 0.034)
    assert row(make_scale(), 1)["efficiency"] == 1


def test_time_without_a_noise_scale_is_for_the_same_epochs(make_scale: Make) -> None:
    one, four = (row(make_scale(), workers) for workers in (1, 4))
    assert one["time_s"] == pytest.approx(235 * 0.034)
    assert four["steps"] == 59  # 235 / 4, rounded up
    assert four["time_s"] == pytest.approx(235 / 4 * four["step_s"])


def test_time_with_a_noise_scale_follows_the_trade(make_scale: Make) -> None:
    found = row(make_scale(), 8, noise="1024")
    assert found["steps"] == pytest.approx(235 * (1 + 1024 / 1024) / (1 + 1024 / 128), abs=1)
    assert found["time_s"] == pytest.approx(235 * 2 / 9 * found["step_s"])


def test_the_steps_to_a_target_may_be_given(make_scale: Make) -> None:
    assert row(make_scale(), 1, target_steps=1000)["time_s"] == pytest.approx(34)


def test_cost_is_price_times_workers_times_hours(make_scale: Make) -> None:
    found = row(make_scale(), 4, price=3.6)
    assert found["cost"] == pytest.approx(4 * found["time_s"] / 1000)
    assert "cost" not in row(make_scale(), 4)


def test_strong_scaling_keeps_batch_and_steps(make_scale: Make) -> None:
    found = row(make_scale(), 4, mode="strong", noise="1000")
    assert (found["global_batch"], found["steps"]) == (128, 235)


def test_here_needs_all_reduces_that_were_timed(make_scale: Make, make_training: Make) -> None:
    assert row(make_scale(), 2, cluster="here")["samples_per_s"] == pytest.approx(256 / (0.034 + 0.0042), rel=1e-3)
    with pytest.raises(RecordError, match="measure with paceline scale fashion-mnist-mini --workers 1,2"):
        row(make_training(), 2, cluster="here")


def test_a_training_record_brings_its_own_noise_scale(make_training: Make) -> None:
    plan = make_plan(Request(record=str(make_training(noise=[900.0] * 20)), cluster="dgx-h100"))
    assert "noise scale of 900 samples" in " ".join(conclude(plan))
    assert plan.returns.bound == "noise"
    assert plan.returns.stop_at is not None
    assert plan.returns.saved < 0.2


@pytest.mark.parametrize(
    ("link", "bound"),
    [
        ("latency_us = 5000, bandwidth_GBps = 1000", "latency"),
        ("latency_us = 0.001, bandwidth_GBps = 0.05", "bandwidth"),
    ],
)
def test_why_returns_stop(make_scale: Make, tmp_path: Path, link: str, bound: str) -> None:
    file = tmp_path / "slow.toml"
    file.write_text(f'name = "slow"\nworkers_per_node = 1\ntrees = false\ninter = {{{link}}}\n')
    plan = make_plan(Request(record=str(make_scale()), cluster=str(file), mode="strong"))
    assert plan.returns.bound == bound
    assert f"({bound}-bound)" in conclude(plan)[0]


def test_returns_that_do_not_stop_are_said_not_to(make_scale: Make) -> None:
    plan = make_plan(Request(record=str(make_scale()), cluster="h200-node"))
    assert plan.returns.stop_at is None
    assert "do not stop up to 8 workers" in conclude(plan)[0]


def test_a_first_doubling_that_pays_for_the_network_is_not_the_end(make_scale: Make, tmp_path: Path) -> None:
    """Two workers are hardly faster than one here, but sixteen are eight times as fast as two."""
    file = tmp_path / "slow.toml"
    file.write_text('name = "slow"\nworkers_per_node = 1\ninter = {latency_us = 1, bandwidth_GBps = 0.12}\n')
    plan = make_plan(Request(record=str(make_scale()), cluster=str(file)))
    one, two, sixteen = (plan.rows[i]["time_s"] for i in (0, 1, 4))
    assert two > 0.8 * one
    assert sixteen < 0.2 * two
    assert plan.returns.stop_at is None or plan.returns.stop_at > 16


def test_a_list_of_presets_needs_no_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_verb(cluster="list") == 0
    assert "dgx-h100" in capsys.readouterr().out


def test_a_record_by_its_name(make_scale: Make) -> None:
    folder = make_scale()
    assert make_plan(Request(record=folder.name, cluster="gigabit-lab", runs_dir=str(folder.parent))).rows


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"workers": "0"}, "it must be counts above 0"),
        ({"workers": "two"}, "it must be counts above 0"),
        ({"workers": "16", "cluster": "h200-node"}, "h200-node is one node of 8"),
        ({"workers": "256", "mode": "strong"}, "a fixed global batch of 128 has no more samples"),
        ({"mode": "sideways"}, "--mode is 'sideways'"),
        ({"speed": 0.0}, "--speed is 0: it must be a number above 0"),
        ({"price": -1.0}, "--price is -1"),
        ({"target_steps": 0}, "--target-steps is 0"),
        ({"noise": "-5"}, "--noise is -5"),
        ({"noise": "nowhere"}, "neither a number of samples nor a record"),
        ({"cluster": "gigabit-lob"}, "did you mean 'gigabit-lab'?"),
        ({"record": ""}, "plan needs a RECORD"),
        ({"record": "nowhere"}, "no record at nowhere"),
        ({"json": "/nowhere/plan.json"}, "cannot write --json"),
    ],
)
def test_wrong_input_is_one_line(make_scale: Make, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(PacelineError) as caught:
        plan_verb(**{"record": str(make_scale()), "cluster": "gigabit-lab", **flags})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_record_without_a_noise_scale_has_none_to_give(make_scale: Make, make_training: Make) -> None:
    with pytest.raises(UsageError, match="measured no noise scale: train it with --measure-noise"):
        row(make_scale(), 2, noise=str(make_training()))
    assert row(make_scale(), 2, noise=str(make_training(noise=[700.0] * 4)))["steps"] > 118


def test_nothing_of_it_imports_torch() -> None:
    code = "import sys, paceline.plan.plan, paceline.plan.advise; assert 'torch' not in sys.modules, 'torch is loaded'"
    subprocess.run([sys.executable, "-c", code], check=True)
