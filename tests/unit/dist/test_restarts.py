"""The crew and the command of the next attempt."""

from pathlib import Path

import pytest

from paceline.config import Config
from paceline.dist import restarts
from paceline.dist.restarts import Crew, FailedAttempt, newest_checkpoint, next_crew, restart_command

CONFIG = Config(workers=2, min_workers=1, max_restarts=3)


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr(restarts, "_gpus", lambda crew: ())


def test_the_newest_checkpoint_is_the_one_of_the_latest_step(tmp_path):
    assert newest_checkpoint(None) == -1
    assert newest_checkpoint(tmp_path) == -1
    (tmp_path / "checkpoints").mkdir()
    for name in ("step-900.safetensors", "step-00001000.safetensors", "step-.safetensors", ".step-2000.safetensors.part"):
        (tmp_path / "checkpoints" / name).touch()
    assert newest_checkpoint(tmp_path) == 1000


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize(
    ("before", "after", "workers"),
    [
        (None, FailedAttempt(1, -1), 2),
        (FailedAttempt(1, -1), FailedAttempt(1, -1), 1),
        (FailedAttempt(1, 40), FailedAttempt(1, 40), 1),
        (FailedAttempt(1, 40), FailedAttempt(1, 50), 2),
        (FailedAttempt(0, 40), FailedAttempt(1, 40), 2),
    ],
)
def test_a_worker_that_fails_first_twice_without_progress_is_dropped(before, after, workers):
    crew, why = next_crew(Crew(2), before, after, CONFIG)
    assert crew == Crew(workers)
    assert why == ("" if workers == 2 else ": worker 1's device failed twice and is no longer used")


@pytest.mark.parametrize("config", [Config(workers=2), Config(workers=2, min_workers=1, nodes=2, rendezvous="a:1")])
def test_fewer_workers_only_if_allowed_and_on_one_node(config, monkeypatch):
    monkeypatch.setattr(restarts, "_gpus", lambda crew: pytest.fail("nobody asked"))
    assert next_crew(Crew(2), FailedAttempt(1, 0), FailedAttempt(1, 0), config) == (Crew(2), "")


@pytest.mark.parametrize(
    ("gpus", "crew"),
    [
        ({"0": True, "1": True}, Crew(2)),
        ({"0": True}, Crew(1, ("0",))),  # one is lost
        ({"4": False, "5": True}, Crew(1, ("5",))),
        ({"0": False, "1": True, "2": True}, Crew(2, ("1", "2"))),  # there is a spare
        ({"0": False, "1": False}, Crew(0, ())),
    ],
)
def test_gpus_that_no_longer_answer_are_dropped(gpus, crew, monkeypatch):
    monkeypatch.setattr(restarts, "_gpus", lambda crew: tuple(gpus.items()))
    found, why = next_crew(Crew(2), None, FailedAttempt(0, 0), CONFIG)
    assert found == crew
    assert bool(why) == (crew.devices is not None)


def test_the_gpu_of_a_dropped_worker_is_dropped(monkeypatch):
    monkeypatch.setattr(restarts, "_gpus", lambda crew: (("3", True), ("5", True), ("7", True)))
    crew, _ = next_crew(Crew(3), FailedAttempt(1, 0), FailedAttempt(1, 0), Config(workers=3, min_workers=1))
    assert crew == Crew(2, ("3", "7"))


def test_a_spare_gpu_replaces_a_lost_one(monkeypatch):
    monkeypatch.setattr(restarts, "_gpus", lambda crew: tuple((str(i), True) for i in range(4)))
    crew, why = next_crew(Crew(2), FailedAttempt(1, 0), FailedAttempt(1, 0), CONFIG)
    assert (crew, why) == (Crew(2, ("0", "2", "3")), ": worker 1's device failed twice and is no longer used")


def test_workers_that_share_a_gpu_are_not_limited_by_it(monkeypatch):
    monkeypatch.setattr(restarts, "_gpus", lambda crew: (("0", True),))
    assert next_crew(Crew(2), None, FailedAttempt(1, 0), Config(workers=2, min_workers=1, backend="gloo")) == (Crew(2), "")


def test_the_same_workers_resume_the_record():
    command = ["train", "t.py", "--resume=auto", "--workers=2"]
    again = restart_command(command, Crew(2), CONFIG, Path("/runs/x"))
    assert again == ["train", "t.py", "--workers=2", "--resume=/runs/x"]
    assert restart_command(again, Crew(2), CONFIG, Path("/runs/x")) == again


def test_without_a_record_the_command_stays():
    assert restart_command(["train", "t.py", "--resume=auto"], Crew(2), CONFIG, None) == ["train", "t.py", "--resume=auto"]


def test_fewer_workers_keep_the_virtual_workers():
    again = restart_command(["train", "t.py", "--workers=2"], Crew(1), CONFIG, None)
    assert again == ["train", "t.py", "--workers=1", "--virtual-workers=2"]
    given = Config(workers=2, virtual_workers=8)
    assert restart_command(["train", "--virtual-workers=8"], Crew(1), given, None) == [
        "train",
        "--virtual-workers=8",
        "--workers=1",
    ]


def test_the_virtual_workers_are_those_of_the_record(tmp_path):
    (tmp_path / "config.toml").write_text("virtual_workers = 8\n")
    assert restart_command(["train"], Crew(1), CONFIG, tmp_path)[-1] == "--virtual-workers=8"
    (tmp_path / "config.toml").write_text("virtual_workers = ")
    assert restart_command(["train"], Crew(1), CONFIG, tmp_path)[-1] == "--virtual-workers=2"
