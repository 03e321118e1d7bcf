"""The number of workers over time: from text to counts, and what is refused."""

from typing import Any

import pytest

from harness.training import ALONE
from paceline.config import Config, check_options, make_config, merge_options
from paceline.dist.place import check_workers, read_place
from paceline.errors import UsageError
from paceline.joins import (
    Spot,
    check_fits,
    count_workers,
    describe_schedule,
    most_workers,
    parse_workers_schedule,
    write_workers_schedule,
)
from paceline.training.joining import first_workers, settle_schedule
from paceline.training.terms import make_steps


def at(epoch: float, batch: int = 64, parts: int = 4) -> Spot:
    return Spot(done=round(epoch * 1000), samples=1000, global_batch=batch, parts=parts, largest_batch=256)


def test_a_schedule_is_read_and_written():
    assert parse_workers_schedule("0:1, 1:2 2.5:4") == ((0.0, 1), (1.0, 2), (2.5, 4))
    assert write_workers_schedule({"0": 1, "2.5": 4}) == "0:1 2.5:4"
    assert check_options({"workers_schedule": {"0": 1, "1": 2}})["workers_schedule"] == "0:1 1:2"
    assert [most_workers(text) for text in ("", "auto", "auto:3", "0:4 1:2")] == [0, 0, 3, 4]
    assert describe_schedule("0:1 1:2 2.5:4") == "1 worker, 2 from epoch 1, 4 from epoch 2.5"
    assert describe_schedule("auto:4") == "up to 4 workers, in proportion to the global batch"


def test_workers_follow_the_clock():
    counts = [count_workers("0:1 1:2 2.5:4", at(epoch)) for epoch in (0, 0.999, 1, 2.499, 2.5, 9)]
    assert counts == [1, 1, 2, 2, 4, 4]


def test_auto_keeps_the_samples_per_worker():
    assert [count_workers("auto:4", at(0, batch)) for batch in (8, 64, 128, 256)] == [1, 1, 2, 4]
    assert count_workers("auto:4", at(0, 256, parts=2)) == 2, "a worker without a part would be idle"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0:1 2:2 1:4", "1:4 comes after a count that starts at epoch 2: each count must start later than the one before"),
        ("0:1 0:2", "0:2 comes after a count that starts at epoch 0"),
        ("1:2", "--workers-schedule starts at epoch 1: the first count must start at epoch 0"),
        ("0:0", "it must be epoch:workers pairs"),
        ("0:1.5", "it must be epoch:workers pairs"),
        ("4", "it must be epoch:workers pairs"),
        ("-1:4", "it must be epoch:workers pairs"),
        ("0:nan", "it must be epoch:workers pairs"),
        ("0:1 1:\u0662", "it must be epoch:workers pairs"),  # a digit, but not of ASCII
        ("0:1 1:1_0", "it must be epoch:workers pairs"),
        ("auto:0", "it must be epoch:workers pairs"),
        ("auto:x", "it must be epoch:workers pairs"),
        ("0:5000", "--workers-schedule has 5,000 workers: it must be at most 4,096"),
    ],
)
def test_a_wrong_schedule_is_one_line(text, said):
    with pytest.raises(UsageError) as error:
        check_options({"workers_schedule": text})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 2, "workers_schedule": "0:1 1:2"}, "--workers and --workers-schedule are both given: choose one"),
        ({"workers": "auto", "workers_schedule": "0:1"}, "--workers and --workers-schedule are both given: choose one"),
        ({"workers_schedule": "0:1 1:2", "nodes": 2}, "--workers-schedule works on one node"),
        ({"workers_schedule": "0:1 1:2", "min_workers": 1}, "leave out --min-workers"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], said: str):
    with pytest.raises(UsageError, match=said):
        make_config(options)


def test_a_later_layer_replaces_a_number_by_a_schedule_and_back():
    assert merge_options({"workers": 2}, {"workers": "auto"}) == {"workers_schedule": "auto"}
    assert merge_options({"workers_schedule": "0:1"}, {"workers": 2}) == {"workers": 2}
    assert make_config({"workers": 2}, {"workers_schedule": "0:1 1:2"}).workers is None
    assert make_config({"workers": "auto"}).workers_schedule == "auto"


def test_a_schedule_must_fit_the_run():
    with pytest.raises(UsageError, match="4 workers from epoch 1 on, but there are 2 virtual workers: use at most 2"):
        check_fits("0:1 1:4", 2)
    with pytest.raises(UsageError, match="2 workers from epoch 3 on, but the run has 3 epochs: give more --epochs"):
        make_steps(Config(workers_schedule="0:1 3:2", epochs=3), ALONE, 1000)
    with pytest.raises(UsageError, match="4 workers from epoch 1 on, but there are 2 virtual workers"):
        make_steps(Config(workers_schedule="0:1 1:4", virtual_workers=2), ALONE, 1000)
    with pytest.raises(UsageError, match="--workers auto follows --batch-schedule, which is not given"):
        make_steps(Config(workers_schedule="auto:2"), ALONE, 1000)
    assert make_steps(Config(workers_schedule="0:1 1:4"), ALONE, 1000)[0].parts == 4, "V is the largest number of workers"


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "torchrun"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "mpirun"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}, "srun"),
    ],
)
def test_a_job_of_another_launcher_keeps_its_size(env, launcher):
    said = f"a job keeps its size under {launcher}, which started 2 workers: leave it out, or run `paceline train` by itself"
    with pytest.raises(UsageError, match=said):
        check_workers(read_place(env), None, "0:1 1:2")
    check_workers(read_place({**env, "PACELINE_MESSAGES": "x"}) if launcher == "torchrun" else read_place({}), None, "0:1 1:2")


def settled(monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int = 6, **options: Any) -> str:
    monkeypatch.setattr("paceline.training.joining.count_gpus", lambda backend: gpus)
    monkeypatch.setattr("paceline.training.joining.core_count", lambda: cores)
    names = ("workers_schedule", "virtual_workers")
    return settle_schedule(options, Config(**{name: options[name] for name in names if name in options}))


def test_auto_means_the_devices_of_this_node(monkeypatch):
    auto: dict[str, Any] = {"workers_schedule": "auto"}
    assert settled(monkeypatch, 8, **auto) == "auto:8"
    assert settled(monkeypatch, 0, **auto) == "auto:6"
    assert settled(monkeypatch, 8, **auto, virtual_workers=4) == "auto:4"
    assert settled(monkeypatch, 0, **auto, batch_schedule="0:64 1:256") == "auto:4", "6 parts do not divide a batch of 256"
    assert settled(monkeypatch, 2, workers_schedule="auto:2") == "auto:2"
    with pytest.raises(UsageError, match="--workers-schedule has 4 workers on a node with 2 GPUs: use at most 2"):
        settled(monkeypatch, 2, workers_schedule="0:1 1:4")


@pytest.mark.parametrize(
    ("schedule", "options", "workers"),
    [
        ("0:2 1:4", {}, 2),
        ("0:2 0.01:4", {}, 2),
        ("auto:4", {"batch_schedule": "0:128 1:256"}, 2),
        ("auto:4", {"batch_schedule": {"0": 64, "1": 256}}, 1),
        ("auto:4", {"batch_schedule": "auto:64", "global_batch": 128}, 2),
        ("auto:4", {}, 1),  # the task may have a schedule
        ("auto:4", {"batch_schedule": "auto:1024"}, 1),  # the task may have a larger global batch
    ],
)
def test_the_first_workers_of_a_new_run(schedule, options, workers):
    assert first_workers(options, Config(workers_schedule=schedule), None) == workers


def test_a_schedule_without_workers_is_refused():
    with pytest.raises(UsageError, match="--workers-schedule has no workers: it must be epoch:workers pairs"):
        write_workers_schedule({})
