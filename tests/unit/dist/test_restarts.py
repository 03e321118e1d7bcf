"""Who takes part in the next attempt, and with which command."""

from pathlib import Path

import pytest

from paceline.config import Config
from paceline.dist import restarts
from paceline.dist.restarts import Crew, Failure, command_again, newest_checkpoint, next_crew

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
        (None, Failure(1, -1), 2),
        (Failure(1, -1), Failure(1, -1), 1),
        (Failure(1, 40), Failure(1, 40), 1),
        (Failure(1, 40), Failure(1, 50), 2),
        (Failure(0, 40), Failure(1, 40), 2),
    ],
)
def test_a_worker_first_to_fail_twice_at_the_same_place_is_gone(before, after, workers):
    crew, why = next_crew(Crew(2), before, after, CONFIG)
    assert crew == Crew(workers)
    assert why == ("" if workers == 2 else ": worker 1's device counts as gone")


@pytest.mark.parametrize("config", [Config(workers=2), Config(workers=2, min_workers=1, nodes=2, rendezvous="a:1")])
def test_fewer_workers_only_where_that_is_wished_and_on_one_node(config, monkeypatch):
    monkeypatch.setattr(restarts, "_gpus", lambda crew: pytest.fail("nobody asked"))
    assert next_crew(Crew(2), Failure(1, 0), Failure(1, 0), config) == (Crew(2), "")


@pytest.mark.parametrize(
    ("gpus", "crew"),
    [
        ({"0": True, "1": True}, Crew(2)),
        ({"0": True}, Crew(1, ("0",))),  # one fell off the bus
        ({"4": False, "5": True}, Crew(1, ("5",))),
        ({"0": False, "1": True, "2": True}, Crew(2, ("1", "2"))),  # there is another one
        ({"0": False, "1": False}, Crew(0, ())),
    ],
)
def test_gpus_that_no_longer_answer_are_gone(gpus, crew, monkeypatch):
    monkeypatch.setattr(restarts, "_gpus", lambda crew: tuple(gpus.items()))
    found, why = next_crew(Crew(2), None, Failure(0, 0), CONFIG)
    assert found == crew
    assert bool(why) == (crew.devices is not None)


def test_the_gpu_of_a_worker_that_is_gone_is_taken_out(monkeypatch):
    monkeypatch.setattr(restarts, "_gpus", lambda crew: (("3", True), ("5", True), ("7", True)))
    crew, _ = next_crew(Crew(3), Failure(1, 0), Failure(1, 0), Config(workers=3, min_workers=1))
    assert crew == Crew(2, ("3", "7"))


def test_a_spare_gpu_takes_the_place_of_one_that_is_gone(monkeypatch):
    monkeypatch.setattr(restarts, "_gpus", lambda crew: tuple((str(i), True) for i in range(4)))
    crew, why = next_crew(Crew(2), Failure(1, 0), Failure(1, 0), CONFIG)
    assert (crew, why) == (Crew(2, ("0", "2", "3")), ": worker 1's device counts as gone")


def test_workers_that_share_a_gpu_are_not_counted_by_it(monkeypatch):
    monkeypatch.setattr(restarts, "_gpus", lambda crew: (("0", True),))
    assert next_crew(Crew(2), None, Failure(1, 0), Config(workers=2, min_workers=1, backend="gloo")) == (Crew(2), "")


def test_the_same_workers_go_on_with_the_record():
    command = ["train", "t.py", "--resume=auto", "--workers=2"]
    again = command_again(command, Crew(2), CONFIG, Path("/runs/x"))
    assert again == ["train", "t.py", "--workers=2", "--resume=/runs/x"]
    assert command_again(again, Crew(2), CONFIG, Path("/runs/x")) == again


def test_without_a_record_the_command_stays():
    assert command_again(["train", "t.py", "--resume=auto"], Crew(2), CONFIG, None) == ["train", "t.py", "--resume=auto"]


def test_fewer_workers_keep_the_parts():
    again = command_again(["train", "t.py", "--workers=2"], Crew(1), CONFIG, None)
    assert again == ["train", "t.py", "--workers=1", "--virtual-workers=2"]
    given = Config(workers=2, virtual_workers=8)
    assert command_again(["train", "--virtual-workers=8"], Crew(1), given, None) == [
        "train",
        "--virtual-workers=8",
        "--workers=1",
    ]


def test_the_parts_are_those_of_the_record(tmp_path):
    (tmp_path / "config.toml").write_text("virtual_workers = 8\n")
    assert command_again(["train"], Crew(1), CONFIG, tmp_path)[-1] == "--virtual-workers=8"
    (tmp_path / "config.toml").write_text("virtual_workers = ")
    assert command_again(["train"], Crew(1), CONFIG, tmp_path)[-1] == "--virtual-workers=2"
