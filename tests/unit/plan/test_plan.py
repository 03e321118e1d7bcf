import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError, RecordError, UsageError
from paceline.plan.plan import Request, conclude, introduce, make_plan, plan_verb, table, write_json

Make = Callable[..., Path]


def row(record: Path, workers: int, cluster: str = "gigabit-lab", **flags: Any) -> dict[str, Any]:
    return make_plan(Request(record=str(record), cluster=cluster, workers=str(workers), **flags)).rows[0]


def test_the_verb_shows_a_table_and_what_it_means(make_scale: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    large = {"epochs": 5, "steps_per_epoch": 46875, "global_batch": 128, "train_samples": 6_000_000}
    assert plan_verb(record=str(make_scale(contract=large)), cluster="aws-p5", speed=30.0, json=str(out)) == 0
    said = capsys.readouterr().out
    assert "4,096" in said
    assert "Returns " in said
    assert "USD" in said
    assert "The accuracy at these batches is unknown: paceline rehearse" in said
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
    assert four["steps"] == 60  # five epochs of 6,000 / 512, rounded up
    assert four["time_s"] == 60 * four["step_s"]


def test_time_with_a_noise_scale_follows_the_tradeoff(make_scale: Make) -> None:
    found = row(make_scale(), 8, noise="1024")
    assert found["steps"] == pytest.approx(235 * (1 + 1024 / 1024) / (1 + 1024 / 128), abs=1)
    assert found["steps"] == 53  # 52.2
    assert found["time_s"] == 53 * found["step_s"]


def test_times_end_where_a_step_would_need_the_training_set(make_scale: Make) -> None:
    plan = make_plan(Request(record=str(make_scale(bytes_per_s=1e12)), cluster="dgx-h100"))
    assert [each["workers"] for each in plan.rows] == [1 << i for i in range(13)], "speeds are told up to 4,096 workers"
    timed = [each for each in plan.rows if "time_s" in each]
    assert [each["workers"] for each in timed] == [1, 2, 4, 8, 16, 32]
    assert [each["steps"] for each in timed] == [235, 120, 60, 30, 15, 10]
    assert all(each["time_s"] == each["steps"] * each["step_s"] for each in timed)
    said = conclude(plan)
    assert "No time is predicted for 64 workers and more: a step would need more than the 6,000 training images." in said


def test_the_training_set_may_be_what_stops_returns(make_scale: Make) -> None:
    """An epoch has only two batches: beyond that there is nothing to divide."""
    few = {"epochs": 5, "steps_per_epoch": 8, "global_batch": 128, "train_samples": 1024}
    plan = make_plan(Request(record=str(make_scale(contract=few)), cluster="dgx-h100"))
    assert (plan.returns.stop_at, plan.returns.bound) == (8, "data")
    assert "(data-bound)" in conclude(plan)[0]
    uneven = make_plan(Request(record=str(make_scale(contract={**few, "train_samples": 1030})), cluster="dgx-h100"))
    assert [each["steps"] for each in uneven.rows if "steps" in each] == [40, 23, 14, 9]
    assert uneven.returns.bound == "data"


def test_a_run_of_few_whole_steps_is_not_bound_by_noise(make_scale: Make) -> None:
    few = {"epochs": 1, "steps_per_epoch": 3, "global_batch": 128, "train_samples": 128 * 3}
    plan = make_plan(Request(record=str(make_scale(contract=few)), cluster="dgx-h100", noise="1e6", samples=1))
    assert plan.returns.bound == "data"


def test_a_count_beyond_the_training_set_has_a_speed_and_no_time(make_scale: Make) -> None:
    plan = make_plan(Request(record=str(make_scale()), cluster="aws-p5", workers="32,64,4096"))
    assert "time_s" in plan.rows[0]
    assert not {"time_s", "steps", "cost"} & {*plan.rows[1], *plan.rows[2]}
    assert plan.rows[2]["samples_per_s"] > plan.rows[0]["samples_per_s"]
    assert table(plan).splitlines()[3].split()[-4:] == ["-"] * 4
    assert "No time is predicted for 64 workers and more: a step would need more than the 6,000 training images." in conclude(
        plan
    )


def test_a_narrow_terminal_gets_several_tables_and_whole_numbers(make_scale: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(Request(record=str(make_scale()), cluster="aws-p5"))
    wide = table(plan).splitlines()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("paceline.output.is_terminal", lambda stream: True)
    narrow = table(plan).split("\n\n")
    assert len(narrow) > 1
    assert all(len(line) <= 80 for each in narrow for line in each.splitlines())
    assert {len(each.splitlines()) for each in narrow} == {len(wide)}, "no cell is wrapped"
    assert all(each.split()[0] == "workers" for each in narrow)
    assert [word for each in narrow for word in each.splitlines()[0].split()].count("cost") == 1


def test_strong_scaling_ends_with_the_samples_of_its_batch(make_scale: Make) -> None:
    plan = make_plan(Request(record=str(make_scale()), cluster="dgx-h100", mode="strong"))
    assert [each["workers"] for each in plan.rows] == [1 << i for i in range(8)]
    assert plan.returns.most == 128


def test_shared_cores_are_the_reason_in_strong_scaling_too(make_scale: Make, tmp_path: Path) -> None:
    file = tmp_path / "few.toml"
    link = "intra = {latency_us = 0.001, bandwidth_GBps = 10000}"
    file.write_text(f'name = "few"\nworkers_per_node = 64\ncores_per_node = 2\n{link}\n')
    plan = make_plan(Request(record=str(make_scale()), cluster=str(file), mode="strong"))
    assert (plan.returns.stop_at, plan.returns.bound) == (2, "cores")
    file.write_text(f'name = "many"\nworkers_per_node = 64\n{link}\n')
    plan = make_plan(Request(record=str(make_scale()), cluster=str(file), mode="strong"))
    assert plan.returns.bound == "overhead"


CPU = {"devices": "1 CPU worker, 1 thread (2 cores, no GPU)", "backend": "gloo"}


def test_cores_can_be_given(make_scale: Make) -> None:
    """As measured, four workers share two cores; with `none` they do not; with 2, all nodes share two cores."""
    one, apart = make_scale("one", contract=CPU), make_scale("apart", contract=CPU, on_node=1)
    for record, cores, compute in (
        *(
            (one, "", 0.06),
            (one, "none", 0.03),
            (one, "4", 0.03),
            (one, "1", 0.06),
        ),  # two workers were measured on that machine and were not slower
        *((apart, "", 0.03), (apart, "none", 0.03), (apart, "2", 0.06)),
    ):
        found = row(record, 4, cluster="here", cores=cores)
        assert found["components_s"]["compute"] == pytest.approx(compute), (record.name, cores)
    assert row(one, 4, cores="2")["components_s"]["compute"] == pytest.approx(0.06)


def test_workers_that_share_no_cores_still_use_them_for_the_link(make_scale: Make) -> None:
    plan = make_plan(Request(record=str(make_scale(contract=CPU)), cluster="here", cores="none"))
    assert (plan.model.cluster.cores_per_node, plan.model.cluster.link_cores) == (None, 2)
    assert any("each worker has its own device" in line for line in introduce(plan))


def test_one_worker_per_node_is_predicted_over_the_network(make_scale: Make) -> None:
    plan = make_plan(Request(record=str(make_scale(on_node=1)), cluster="here", workers="4"))
    assert plan.rows[0]["nodes"] == 4
    assert plan.model.cluster.intra is None


def test_a_target_can_be_given_if_the_record_has_no_run(make_scale: Make) -> None:
    record = make_scale(contract={})
    assert "time_s" not in row(record, 2)
    assert row(record, 1, target_steps=1000)["time_s"] == pytest.approx(34)
    assert row(record, 2, target_steps=1000)["steps"] == 500


def test_a_factor_at_its_limit_is_not_trusted(make_scale: Make) -> None:
    slow = {"input": 0.0, "compute": 0.03, "communication": 3.0, "waiting": 0.0, "optimizer": 0.0, "other": 0.0}
    folder = make_scale()
    found = json.loads((folder / "scale.json").read_text())
    found["counts"][1] |= {"components_s": slow, "samples_per_s": 256 / 3.03, "windows": []}
    (folder / "scale.json").write_text(json.dumps(found))
    said = conclude(make_plan(Request(record=str(folder), cluster="here")))
    assert any("take 20.00 times" in line and "the limit of the model" in line for line in said)


def test_the_steps_to_a_target_can_be_given(make_scale: Make) -> None:
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


def test_returns_that_do_not_stop_are_reported(make_scale: Make) -> None:
    plan = make_plan(Request(record=str(make_scale()), cluster="h200-node"))
    assert plan.returns.stop_at is None
    assert "continue up to 8 workers" in conclude(plan)[0]


def test_a_first_doubling_that_pays_for_the_network_is_not_the_end(make_scale: Make, tmp_path: Path) -> None:
    """Here two workers are hardly faster than one, but sixteen are eight times as fast as two."""
    file = tmp_path / "slow.toml"
    file.write_text('name = "slow"\nworkers_per_node = 1\ninter = {latency_us = 1, bandwidth_GBps = 0.12}\n')
    plan = make_plan(Request(record=str(make_scale()), cluster=str(file)))
    one, two, sixteen = (plan.rows[i]["time_s"] for i in (0, 1, 4))
    assert two > 0.8 * one
    assert sixteen < 0.2 * two
    assert plan.returns.stop_at is None or plan.returns.stop_at > 16


SIX = 'name = "six"\nworkers_per_node = 6\nintra = {latency_us = 1, bandwidth_GBps = 1000}\n'


def test_a_node_of_six_is_predicted_up_to_six_workers(make_scale: Make, tmp_path: Path) -> None:
    file = tmp_path / "six.toml"
    file.write_text(SIX)
    plan = make_plan(Request(record=str(make_scale()), cluster=str(file)))
    assert [each["workers"] for each in plan.rows] == [1, 2, 4, 6]
    assert (plan.returns.stop_at, plan.returns.looked) == (None, (1, 2, 4, 6))
    saved = 1 - plan.rows[3]["time_s"] / plan.rows[2]["time_s"]
    said = f"Returns continue up to 6 workers: the last increase, from 4 to 6, still saves {saved:.0%} of the time."
    assert said in conclude(plan)[0]


def test_a_last_increase_below_a_doubling_need_not_save_as_much(make_scale: Make, tmp_path: Path) -> None:
    """From four workers to five, at most a fifth of the time can be saved; a little less does not end returns."""
    file = tmp_path / "five.toml"
    file.write_text(SIX.replace("6", "5"))
    plan = make_plan(Request(record=str(make_scale()), cluster=str(file)))
    assert plan.rows[3]["time_s"] > 0.8 * plan.rows[2]["time_s"]
    assert (plan.returns.stop_at, plan.returns.most) == (None, 5)


def test_a_last_increase_below_a_doubling_is_named_by_its_count(make_scale: Make, tmp_path: Path) -> None:
    """On four cores, six workers are slower in proportion, although they are not twice four."""
    file = tmp_path / "six.toml"
    file.write_text(SIX + "cores_per_node = 4\n")
    plan = make_plan(Request(record=str(make_scale()), cluster=str(file), noise="1e9"))
    assert (plan.returns.stop_at, plan.returns.bound) == (4, "cores")
    assert "Returns stop at 4 workers: 6 workers save" in conclude(plan)[0]


def test_if_only_the_data_is_the_limit_no_saving_is_stated(make_scale: Make) -> None:
    plan = make_plan(Request(record=str(make_scale(bytes_per_s=1e12)), cluster="dgx-h100", speed=1e-3))
    assert (plan.returns.stop_at, plan.returns.saved, plan.returns.bound) == (32, None, "data")
    said = conclude(plan)[0]
    assert said.startswith("Returns stop at 32 workers: with twice as many, a step would need more than the training set (data")
    assert "saves" not in said


def test_a_fixed_batch_does_not_use_the_noise_scale(make_scale: Make) -> None:
    said = " ".join(conclude(make_plan(Request(record=str(make_scale()), cluster="dgx-h100", mode="strong", noise="900"))))
    assert "a fixed global batch needs the same steps with any number of workers" in said
    assert "noise scale of" not in said


def test_a_run_that_was_not_trained_has_no_accuracy(make_scale: Make) -> None:
    said = " ".join(conclude(make_plan(Request(record=str(make_scale()), cluster="dgx-h100", noise="900"))))
    assert "Time is for the same progress as 5 epochs at a global batch of 128 (its contract). The steps follow" in said
    assert "came to" not in said


def test_the_introduction_names_what_was_measured(make_scale: Make, tmp_path: Path) -> None:
    file = tmp_path / "six.toml"
    file.write_text(SIX)
    for counts, words in (((1,), "1 worker,"), ((2,), "2 workers,"), ((1, 2, 3), "1, 2 and 3 workers,")):
        said = introduce(make_plan(Request(record=str(make_scale(counts=counts)), cluster=str(file))))
        assert said[0].startswith(f"measured: fashion-mnist-mini with {words} 128 images")
        assert "1 bucket (" in said[0] or "2 buckets (" in said[0] or counts == (1,)
        assert said[1] == "cluster: six"


def test_json_holds_no_nan(make_scale: Make, tmp_path: Path) -> None:
    plan = make_plan(Request(record=str(make_scale()), cluster="gigabit-lab", workers="2"))
    plan.rows[0]["step_s"] = float("nan")
    with pytest.raises(UsageError, match=r"cannot write --json .*: a predicted number is not finite"):
        write_json(plan, tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


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
        ({"workers": "99999999999999999999"}, "--workers asks for more than 1,000,000"),
        ({"speed": 1e-300}, "--speed is 1e-300: it must be 1e-06 to 1e+06"),
        ({"speed": 1e7}, "--speed is 1e+07: it must be"),
        ({"speed": float("nan")}, "--speed is nan"),
        ({"cores": "many"}, "--cores is 'many': it must be a number of cores above 0, or none"),
        ({"cores": "0"}, "--cores is '0'"),
        ({"cores": "2"}, "have GPUs and share no cores"),
        ({"workers": "two"}, "it must be counts above 0"),
        (
            {"workers": "16", "cluster": "h200-node"},
            "a single node of 8; choose a cluster with a network (--cluster list)",
        ),
        ({"workers": "256", "mode": "strong"}, "a fixed global batch of 128 allows at most 128"),
        ({"mode": "sideways"}, "--mode is 'sideways'"),
        ({"speed": 0.0}, "--speed is 0: it must be a number above 0"),
        ({"price": -1.0}, "--price is -1"),
        ({"target_steps": 0}, "--target-steps is 0"),
        ({"noise": "-5"}, "--noise is -5"),
        ({"noise": "nowhere"}, "neither a number of samples nor a record"),
        ({"cluster": "gigabit-lob"}, "did you mean 'gigabit-lab'?"),
        ({"record": ""}, "plan needs a RECORD"),
        ({"record": "nowhere"}, "no record 'nowhere', neither here nor in"),
        ({"json": "/nowhere/plan.json"}, "cannot write --json"),
        ({"noise": "1e13"}, "--noise is 1e+13: it must be at most 1e+12 samples"),
        ({"noise": "9" * 400}, "--noise is inf: it must be a number"),
        ({"workers": "9" * 5000}, "...: it must be counts above 0"),
        ({"target_steps": 10**400}, "...: it must be at most 1e+12"),
        ({"samples": 10**400}, "...: it must be at most 1e+09"),
        ({"samples": 6001}, "--samples is 6,001: the training set has 6,000 images; give at most 6,000"),
        ({"samples": 7, "mode": "strong"}, "--samples is 7, but --mode strong divides the record's global batch: leave"),
        ({"cluster": ""}, "--cluster is empty"),
    ],
)
def test_wrong_input_is_one_line(make_scale: Make, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(PacelineError) as caught:
        plan_verb(**{"record": str(make_scale()), "cluster": "gigabit-lab", **flags})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_record_without_a_noise_scale_is_refused(make_scale: Make, make_training: Make) -> None:
    with pytest.raises(UsageError, match="did not measure the noise scale: train with --measure-noise"):
        row(make_scale(), 2, noise=str(make_training()))
    assert row(make_scale(), 2, noise=str(make_training(noise=[700.0] * 4)))["steps"] > 118
