"""Warnings about the input of a prediction: from noisy or contradicting timings, and none from quiet ones."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.plan.plan import Plan, Request, as_json, introduce, make_plan
from paceline.plan.trust import _rise, relative_iqr
from paceline.records import COMPONENTS

Make = Callable[..., Path]
CPU = {"devices": "1 CPU worker, 1 thread (2 cores, no GPU)", "backend": "gloo", "precision": "fp32"}
FILE = """
name = "mine"
workers_per_node = 8
intra = {latency_us = 10, bandwidth_GBps = 10}
"""


def predict(record: Path, cluster: str = "here", **flags: Any) -> Plan:
    return make_plan(Request(record=str(record), cluster=cluster, **flags))


def edit(record: Path, workers: int, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change what a record measured with this number of workers."""
    found = json.loads((record / "scale.json").read_text())
    for count in found["counts"]:
        if count["workers"] == workers:
            change(count)
    (record / "scale.json").write_text(json.dumps(found))
    return record


def slow_down(times: float) -> Callable[[dict[str, Any]], None]:
    """Let every step take this many times as long, in windows that agree with each other."""

    def change(count: dict[str, Any]) -> None:
        count["samples_per_s"] /= times
        count["windows"] = [window / times for window in count["windows"]]
        count["step_s"] *= times
        for name in ("forward_s", "backward_s"):
            count[name] *= times
        count["components_s"] = {name: seconds * times for name, seconds in count["components_s"].items()}

    return change


def spread(*shares: float) -> Callable[[dict[str, Any]], None]:
    """Let the windows be these shares of the speed."""
    return lambda count: count.update(windows=[share * count["samples_per_s"] for share in shares])


@pytest.fixture
def own_cluster(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text(FILE)
    return str(tmp_path / "mine.toml")


@pytest.mark.parametrize("cluster", ["here", "gigabit-lab", "own"])
def test_quiet_and_consistent_timings_have_no_warning(make_scale: Make, own_cluster: str, cluster: str) -> None:
    record = make_scale(counts=(1, 2, 4), contract=CPU | {"devices": "1 CPU worker, 1 thread (4 cores, no GPU)"})
    assert predict(record, own_cluster if cluster == "own" else cluster).warnings == ()


def test_a_committed_measurement_of_16_cores_has_no_warning(tmp_path: Path) -> None:
    results = Path(__file__).parents[3] / "bench" / "results"
    (tmp_path / "c16").mkdir()
    (tmp_path / "c16" / "scale.json").write_text((results / "scale_16_cores.json").read_text())
    assert predict(tmp_path / "c16").warnings == ()


def test_a_training_run_has_no_warning(make_training: Make) -> None:
    assert predict(make_training(), "gigabit-lab").warnings == ()


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((0.7, 0.8, 1.0, 1.1, 1.2), "the speed of 2 workers varied from 4,690 to 8,040 images/s (median 6,700, interquartile"),
        ((1.0, 0.25, 1.0, 1.02, 0.98), "varied from 1,680 to 6,840 images/s (median 6,700, interquartile range 2%)"),
    ],
)
def test_windows_that_differ_are_noisy(make_scale: Make, shares: tuple[float, ...], said: str) -> None:
    plan = predict(edit(make_scale(), 2, spread(*shares)))
    noisy, again = plan.warnings
    assert said in noisy
    assert again == (
        "measure again while the machine does nothing else: paceline scale fashion-mnist-mini --workers 1,2 --windows 15"
    )
    lines = introduce(plan)
    assert f"warning: {noisy}" in lines
    assert as_json(plan)["warnings"] == [noisy, again]


def test_all_noisy_counts_are_named_in_one_line(make_scale: Make) -> None:
    record = make_scale(counts=(1, 2, 4))
    for workers in (1, 2, 4):
        edit(record, workers, spread(0.4 * workers / 4, 1, 1, 1, 1.5))
    noisy, _ = predict(record).warnings
    assert noisy.startswith("the speed of 1 worker varied")
    assert noisy.endswith("; it was also noisy with 2 and 4")


def test_measured_efficiency_that_rises_with_more_workers(make_scale: Make) -> None:
    """42% of linear on 2 workers, then 84% on 4, in windows that agree: two workers were slowed down by something else."""
    quiet = make_scale("quiet", counts=(1, 2, 4))
    noisy = edit(make_scale("noisy", counts=(1, 2, 4)), 2, slow_down(2.1))
    plan, before = predict(noisy, "gigabit-lab"), predict(quiet, "gigabit-lab")
    rise, _ = plan.warnings
    assert rise == (
        "measured efficiency rises from 42% with 2 workers to 84% with 4, but more workers cannot be more efficient; the"
        " range low to high is widened"
    )
    width = [each.rows[0]["high"] / each.rows[0]["low"] for each in (plan, before)]
    assert width[0] > 1.5 * width[1]


def test_predicted_efficiency_that_rises_because_workers_shared_cores(make_scale: Make, own_cluster: str) -> None:
    """Four workers on two cores took only a little longer than two: without shared cores they would be too fast."""
    record = edit(make_scale(counts=(1, 2, 4), contract=CPU), 4, slow_down(1.3))
    rise, again = predict(record, own_cluster).warnings
    assert rise.startswith("predicted efficiency rises from 9")
    assert rise.endswith("(4 workers shared 2 cores when measured)")
    assert "--workers 1,2 " in again
    assert predict(record, "here").warnings == (), "here they share cores again"
    assert predict(record, own_cluster, mode="strong").warnings == ()


def test_strong_scaling_may_rise(make_scale: Make) -> None:
    """100 workers cannot share 128 samples evenly: the slowest has two. 128 can."""
    only_compute = {**dict.fromkeys(COMPONENTS, 0.0), "compute": 0.034}
    plan = predict(make_scale(components_s=only_compute), "dgx-h100", mode="strong", workers="100,128")
    assert plan.rows[1]["efficiency"] > 1.05 * plan.rows[0]["efficiency"]
    assert plan.warnings == ()


def test_a_small_rise_is_not_a_contradiction(make_scale: Make) -> None:
    assert predict(edit(make_scale(bytes_per_s=1e12), 2, slow_down(0.97))).warnings == ()


def test_the_tolerance_of_a_rise_follows_from_the_windows() -> None:
    assert _rise([(1, 1.0, 0.0), (2, 0.5, 0.0), (4, 0.6, 0.0)]) == (2, 0.5, 4, 0.6)
    assert _rise([(1, 1.0, 0.0), (2, 0.5, 0.1), (4, 0.6, 0.1)]) == (0, 0.0, 0, 0.0), "within two standard errors"


def test_steps_that_were_timed_under_another_load(make_scale: Make) -> None:
    def change(count: dict[str, Any]) -> None:
        count["components_s"] = {name: 1.9 * seconds for name, seconds in count["components_s"].items()}

    timed, _ = predict(edit(make_scale("cpu", contract=CPU), 2, change)).warnings
    assert timed.startswith("with 2 workers, the steps that gave the components took 1.9 times as long as those that gave")
    assert predict(edit(make_scale("gpu"), 2, change)).warnings == (), "a GPU's timed steps are waited for"


@pytest.mark.parametrize(("windows", "said"), [([], "no measurements"), ([3764.0], "1 measurement of")])
def test_too_few_windows_to_know_the_spread(make_scale: Make, windows: list[float], said: str) -> None:
    plan = predict(make_scale(windows=windows), "gigabit-lab")
    assert f"the record has {said}" in plan.warnings[0]
    assert plan.rows[0]["low"] < 0.9 * plan.rows[0]["samples_per_s"]


def test_cpu_timings_for_gpus(make_scale: Make, own_cluster: str) -> None:
    record = make_scale(contract=CPU)
    (said,) = predict(record, "aws-p5").warnings
    assert said == (
        "compute was timed on CPUs in fp32, but aws-p5 has H100 GPUs, which use bf16: time and cost are far too high, and"
        " efficiency says little; measure on one such GPU (paceline scale fashion-mnist-mini --workers 1), or give --speed"
    )
    assert "but ethernet-10g has GPUs: time" in predict(record, "ethernet-10g").warnings[0]
    assert predict(record, "aws-p5", speed=300.0).warnings == ()
    assert predict(record, own_cluster).warnings == ()
    Path(own_cluster).write_text(FILE + 'gpu = "V100"\n')
    assert "on CPUs, but mine has V100 GPUs: time" in predict(record, own_cluster).warnings[0]


def test_gpu_timings_in_fp32_for_gpus_with_bf16(make_scale: Make) -> None:
    old = {"devices": "1 x Tesla V100", "precision": "fp32"}
    (said,) = predict(make_scale("old", contract=old), "aws-p5").warnings
    assert said.startswith("compute was timed in fp32 on Tesla V100, but H100 GPUs use bf16 by default")
    for number, same in enumerate(({"devices": "1 x NVIDIA H200", "precision": "bf16"}, old | {"devices": "1 x NVIDIA H200"})):
        assert predict(make_scale(f"same-{number}", contract=same), "h200-node").warnings == ()


def test_the_device_of_a_record(make_scale: Make) -> None:
    for devices, device in (
        (CPU["devices"], "CPU"),
        ("2 CPU workers, 1 thread each (1 core, no GPU)", "CPU"),
        ("4 x NVIDIA H200", "NVIDIA H200"),
        ("2 workers sharing 1 x NVIDIA H200", "NVIDIA H200"),
        ("", ""),
    ):
        measured = predict(make_scale(contract={"devices": devices}), "gigabit-lab").model.measured
        assert measured.device == device
        assert measured.cores == ({"1": 1, "2": 2}[devices.partition("(")[2][0]] if device == "CPU" else None)


def test_a_plan_without_warnings_prints_none(make_scale: Make) -> None:
    plan = predict(make_scale())
    assert not any(line.startswith("warning") for line in introduce(plan))
    assert any(line == "warning: look out" for line in introduce(replace(plan, warnings=("look out",))))


def test_the_interquartile_range() -> None:
    assert relative_iqr([1, 2, 3, 4, 5]) == pytest.approx(2 / 3)
    assert relative_iqr([7.0]) == 0
