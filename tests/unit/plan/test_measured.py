import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.measured import phased_step_s
from paceline.errors import RecordError
from paceline.plan.fields import own_flags
from paceline.plan.measured import read_measured
from paceline.records import COMPONENTS

Make = Callable[..., Path]


def test_a_record_of_scale(make_scale: Make) -> None:
    found = read_measured(make_scale(counts=(1, 2), ready=(0.5, 1.0)))
    assert [point.workers for point in found.points] == [1, 2]
    assert found.base.samples == 128
    assert sum(found.base.components_s.values()) == pytest.approx(found.base.step_s)
    assert [bucket.ready for bucket in found.buckets] == [0.5, 1.0]
    assert found.run is not None
    assert (found.run.steps, found.run.global_batch) == (235, 128)
    assert found.assumed == ()
    assert {timing.workers for timing in found.links} == {2}


def test_components_add_up_to_the_time_in_the_windows(make_scale: Make) -> None:
    """Timed steps may be slower than the others: only the windows say how fast training is."""
    found = read_measured(make_scale(counts=(1,), samples_per_s=2000.0))
    assert found.base.step_s == pytest.approx(0.064)
    assert sum(found.base.components_s.values()) == pytest.approx(0.064)
    assert found.base.backward_s == pytest.approx(0.02 * 0.064 / 0.034)


def test_one_worker_has_no_waiting_or_communication(make_scale: Make) -> None:
    odd = {"input": 0.0, "compute": 0.03, "communication": 0.002, "waiting": 0.001, "optimizer": 0.0, "other": 0.001}
    found = read_measured(make_scale(counts=(1,), components_s=odd))
    assert found.base.components_s["communication"] == found.base.components_s["waiting"] == 0
    assert found.base.components_s["other"] / found.base.components_s["compute"] == pytest.approx(0.004 / 0.03)


def test_cpu_workers_share_cores_and_gpu_workers_do_not(make_scale: Make) -> None:
    assert read_measured(make_scale()).cores is None
    cpu = {"devices": "1 CPU worker, 2 threads (4 cores, no GPU)", "backend": "gloo"}
    found = read_measured(make_scale("cpu", contract=cpu))
    assert (found.cores, found.threads, found.slots) == (4, 2, 2), "those that its workers might use, not all of the machine's"


def test_samples_are_called_what_the_record_says(make_scale: Make, make_training: Make) -> None:
    assert read_measured(make_scale()).unit == "images"
    path = make_training()
    about = json.loads((path / "environment.json").read_text())
    for facts, unit in (({"task": "x.py", "unit": "windows"}, "windows"), ({"task": "x.py"}, "samples"), ({}, "images")):
        contract = {**about["contract"], "task": "fashion-mnist", **facts}
        (path / "environment.json").write_text(json.dumps({**about, "contract": contract}))
        assert read_measured(path).unit == unit


def test_without_buckets_ddps_usual_ones_are_assumed_and_listed(make_scale: Make) -> None:
    found = read_measured(make_scale(counts=(1,), gradient_bytes=100 << 20))
    assert [round(bucket.bytes / 2**20) for bucket in found.buckets] == [1, 25, 25, 25, 24]
    assert found.buckets[-1].ready == 1
    assert "DDP's usual buckets" in found.assumed[0]


def test_a_training_record_works_and_lists_its_assumptions(make_training: Make) -> None:
    found = read_measured(make_training(noise=[100.0, 200.0, 300.0]))
    assert found.base.samples_per_s == pytest.approx(128 / 0.034)
    assert found.gradient_bytes == 4_000_000
    assert found.run is not None
    assert (found.run.steps, found.run.train_samples) == (235, 6000)
    assert "accuracy 0.8100" in found.run.about
    assert found.noise is not None
    assert found.noise.scale == 250
    assert any("third of compute" in said for said in found.assumed)
    assert any("3%" in said for said in found.assumed)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: f.rename(f.with_name("gone")), "no record at"),
        (lambda f: (f / "metrics.jsonl").unlink(), "neither scale.json nor metrics.jsonl; paceline scale TASK --workers 1,2"),
        (lambda f: (f / "metrics.jsonl").write_text(""), "no health rows): measure with paceline scale"),
        (lambda f: (f / "metrics.jsonl").write_text('{"no": 1}\n'), "no health rows): measure with paceline scale"),
        (lambda f: (f / "environment.json").write_text('{"contract": nul'), "is not valid JSON"),
        (lambda f: (f / "environment.json").write_text("[]"), "it does not hold a JSON object"),
        (lambda f: (f / "environment.json").unlink(), "cannot read"),
        (lambda f: (f / "environment.json").write_text("{}"), "paceline scale TASK --workers 1,2"),
        (lambda f: (f / "scale.json").write_text('{"task": "mine"}'), "(no 'counts'): measure again with paceline scale mine"),
        (lambda f: (f / "scale.json").write_text('{"counts": []}'), "is incomplete"),
        (lambda f: (f / "scale.json").write_text('{"counts": [{"workers": 1}]}'), "is incomplete (no"),
    ],
)
def test_a_broken_record_is_one_line(make_training: Make, spoil: Callable[[Path], object], says: str) -> None:
    folder = make_training()
    spoil(folder)
    with pytest.raises(RecordError) as caught:
        read_measured(folder)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("contract", "abc", "contract is 'abc': it must be a table"),
        ("workers", 0, "workers is 0: it must be a whole number, 1 or above"),
        ("workers", "two", "workers is 'two': it must be a whole number"),
        ("nodes", 0, "nodes is 0"),
        ("global_batch", 0, "global_batch is 0: it must be a whole number, 1 or above"),
        ("samples_per_s", 0, "samples_per_s is 0: it must be a number above 0"),
        ("buckets", [{"bytes": "many", "ready": 1}], "bytes is 'many'"),
        ("components_s", {}, "no 'input'"),
        ("components_s", 5, "it does not have the format of a record"),
        ("components_s", dict.fromkeys(COMPONENTS, 0), "components_s are all 0"),
        ("contract", {"epochs": 5, "steps_per_epoch": 0, "global_batch": 128}, "steps_per_epoch is 0"),
        ("contract", {"epochs": 5, "steps_per_epoch": 47, "global_batch": 128, "train_samples": -5}, "train_samples is -5"),
    ],
)
def test_foreign_fields_of_a_scale_are_one_line(make_scale: Make, field: str, value: object, says: str) -> None:
    folder = make_scale(**{field: value})
    with pytest.raises(RecordError) as caught:
        read_measured(folder)
    assert f"is incomplete ({says}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("workers", 0), ("global_batch", 0), ("steps_per_epoch", 0), ("parameters", "many"), ("nodes", "x"), ("epochs", 1e400)],
)
def test_foreign_fields_of_a_run_are_one_line(make_training: Make, field: str, value: object) -> None:
    with pytest.raises(RecordError, match=rf"no complete contract \({field} is .*: it must be a whole number"):
        read_measured(make_training(**{field: value}))


def test_deeply_nested_json_is_not_valid(make_scale: Make, make_training: Make) -> None:
    folder = make_scale()
    (folder / "scale.json").write_text("[" * 200_000)
    with pytest.raises(RecordError, match="is not valid JSON"):
        read_measured(folder)
    run = make_training()
    (run / "metrics.jsonl").write_text("[" * 200_000)
    with pytest.raises(RecordError, match="it has no health rows"):
        read_measured(run)


def test_a_record_without_worker_counts_says_so(make_scale: Make) -> None:
    folder = make_scale()
    (folder / "scale.json").write_text('{"counts": []}')
    with pytest.raises(RecordError, match="incomplete \\(it measured no worker counts\\)"):
        read_measured(folder)


def test_the_task_is_as_a_command_line_takes_it(make_scale: Make, make_training: Make) -> None:
    folder = make_training(task="mine")
    about = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**about, "task": "my_task.py"}))
    assert read_measured(folder).task == "my_task.py"
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(RecordError, match=r"paceline scale my_task\.py --workers 1,2"):
        read_measured(folder)


def test_an_all_reduce_used_the_nodes_of_its_count(make_scale: Make) -> None:
    found = read_measured(make_scale(counts=(1, 2, 4), on_node=2))
    assert {(each.workers, each.nodes, each.on_node) for each in found.links} == {(2, 1, 2), (4, 2, 2)}


def test_a_scale_that_measured_nothing_is_incomplete(make_scale: Make) -> None:
    folder = make_scale()
    found = json.loads((folder / "scale.json").read_text())
    found["counts"][0]["samples_per_s"] = "nan"
    (folder / "scale.json").write_text(json.dumps(found))
    with pytest.raises(RecordError, match="incomplete"):
        read_measured(folder)


def test_the_next_command_trains_the_same_model(make_scale: Make, make_training: Make) -> None:
    folder = make_training(model="resnet:depth=8")
    assert read_measured(folder).flags == " --model resnet:depth=8"
    assert "paceline scale fashion-mnist-mini --model resnet:depth=8 --workers 1,2 to know" in read_measured(folder).assumed[0]
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(RecordError, match="paceline scale fashion-mnist-mini --model resnet:depth=8 --workers 1,2"):
        read_measured(folder)
    broken = make_scale(samples_per_s=0, contract={"model": "mlp"})
    with pytest.raises(RecordError, match="paceline scale fashion-mnist-mini --model mlp --workers 1,2"):
        read_measured(broken)


@pytest.mark.parametrize(
    ("contract", "flags"),
    [
        ({"model": "cnn"}, ""),
        ({"model": "Sleeper"}, ""),
        ({"model": "wide-resnet:depth=10,width=4"}, " --model wide-resnet:depth=10,width=4"),
        ({"model": "mlp:width=8; rm"}, " --model 'mlp:width=8; rm'"),
        ({"model": 5}, ""),
        ({}, ""),
        ("abc", ""),
        (None, ""),
    ],
)
def test_own_flags_name_a_model_that_is_not_the_default(contract: object, flags: str) -> None:
    assert own_flags(contract) == flags


def test_infinite_numbers_are_refused(make_scale: Make) -> None:
    for value in (10**400, 1e300):
        with pytest.raises(RecordError, match=r"samples_per_s is .*: it must be a number above 0"):
            read_measured(make_scale(samples_per_s=value))


def _continue_on(record: Path, after: int, slower: float = 2.0, **contract: Any) -> None:
    """From this epoch on the run has other workers, whose steps take longer."""
    rows = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    at = next(i for i, row in enumerate(rows) if row["kind"] == "epoch" and row["epoch"] == after) + 1
    for row in rows[at:]:
        if row["kind"] == "health":
            row["components_s"] = {name: slower * value for name, value in row["components_s"].items()}
            row["samples_per_s"], row["step_s"] = row["samples_per_s"] / slower, row["step_s"] * slower
    resume = {"kind": "resume", "step": rows[at - 1]["step"], "validated": True, "contract": contract}
    rows[at:at] = [resume, {"kind": "join", "step": resume["step"], "workers": 4, "was": 1, "join_s": 2.0}]
    (record / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


FOUR = {"workers": 4, "devices": "4 workers sharing 1 x NVIDIA A100"}


@pytest.mark.parametrize(
    ("after", "workers", "samples", "device", "other"),
    [
        (4, 1, [512, 256], "NVIDIA H200", FOUR["devices"]),
        (2, 1, [256], "NVIDIA H200", FOUR["devices"]),
        (1, 4, [256, 128, 64], "NVIDIA A100", "1 x NVIDIA H200"),
    ],
)
def test_a_run_whose_workers_changed_is_read_as_one_with_most_of_the_steps(
    make_phased: Make, after: int, workers: int, samples: list[int], device: str, other: str
) -> None:
    """Steps: 24 per epoch, then 12, then 6. A step of a phase takes as long as those of these workers alone."""
    record = make_phased()
    _continue_on(record, after, **FOUR)
    found = read_measured(record)
    assert {point.workers for point in found.points} == {workers}
    assert [point.samples for point in found.points] == samples
    step_s = {batch: phased_step_s(batch) * (2 if workers == 4 else 1) for batch in (256, 512, 1024)}
    assert all(point.step_s == pytest.approx(step_s[point.global_batch]) for point in found.points)
    assert found.device == device
    assert found.chosen.endswith(f"; the run was also on {other}")
    assert found.chosen in found.assumed


def test_most_sizes_of_steps_count_more_than_most_steps(make_phased: Make) -> None:
    """One worker had 256 samples in 48 steps; two had 256 and 512 in 36."""
    record = make_phased()
    _continue_on(record, 2, workers=2, devices="2 x NVIDIA H200")
    rows = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["kind"] == "health":
            row["samples_per_worker"] = 512 if row["epoch"] > 4 else 256
    (record / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [point.samples for point in read_measured(record).points] == [512, 256]
    assert {point.workers for point in read_measured(record).points} == {2}


@pytest.mark.parametrize(
    ("change", "also"),
    [({"nodes": 2}, "1 x NVIDIA H200 on 2 nodes"), ({"devices": "1 CPU worker, 2 threads (2 cores)"}, "1 CPU worker")],
)
def test_times_on_other_devices_or_nodes_are_not_mixed(make_phased: Make, change: Any, also: str) -> None:
    record = make_phased()
    before = read_measured(record)
    _continue_on(record, 4, **change)
    found = read_measured(record)
    assert found.points == before.points[1:], "those of the last phase are left out"
    assert found.device == "NVIDIA H200"
    assert f"the run was also on {also}" in found.chosen


def test_cores_are_those_of_the_workers_that_count(make_phased: Make) -> None:
    record = make_phased(devices="1 CPU worker, 2 threads (2 cores, no GPU)")
    _continue_on(record, 1, workers=4, devices="4 CPU workers, 1 thread each (8 cores, no GPU)")
    assert read_measured(record).cores == 8


def test_the_samples_of_the_busiest_worker_are_as_the_row_says(make_phased: Make) -> None:
    """With exact sums and several parts at once, a worker can have more than an equal share."""
    record = make_phased(workers=2, devices="2 x NVIDIA H200")
    rows = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    told = [{**row, "samples_per_worker": 256} if row.get("epoch", 9) <= 2 else row for row in rows]
    (record / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    points = read_measured(record).points
    assert [(point.samples, point.global_batch) for point in points] == [(512, 1024), (256, 512), (256, 256)]


def test_a_constant_run_whose_workers_changed_is_read_so_too(make_training: Make) -> None:
    record = make_training()
    before = read_measured(record)
    assert before.chosen == ""
    rows = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    slow = [{**row, "samples_per_s": 1.0} for row in rows if row["kind"] == "health"]
    resume = {"kind": "resume", "step": max(row.get("step", 0) for row in rows), "contract": {"workers": 2, "devices": ""}}
    with (record / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in (resume, *slow[:1]))
    found = read_measured(record)
    assert found.points == before.points
    assert found.assumed[0] == "the steps that count are those on 1 x NVIDIA H200; the run was also on 2 workers"
