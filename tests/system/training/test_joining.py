"""`--workers-schedule` with real workers: others take over between two steps, and the model has the same bits."""

from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from harness.faults import EPOCHS, fail_at, samples_by_step, train_with, variables
from harness.processes import paceline
from paceline.records import read_metrics, read_result

GROWING = ("--batch-schedule", "0:8 0.6:16", "--smallest-part", "2")


def bits(name: str) -> bytes:
    return Path("runs", name, "model.safetensors").read_bytes()


def rows(name: str, *kinds: str) -> list[dict[str, Any]]:
    """A record's rows of these kinds, without times."""
    found = [row for row in read_metrics(Path("runs", name)) if row["kind"] in kinds]
    return [{key: value for key, value in row.items() if "time" not in key and "per_s" not in key} for row in found]


def joined(name: str) -> list[tuple[int, int, int]]:
    """(step, workers before, workers) of each join."""
    return [(row["step"], row["was"], row["workers"]) for row in rows(name, "join")]


def train(name: str, *flags: str, faults: Any = ()) -> str:
    done = train_with(faults, "--name", name, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a run on one worker."""
    folder = tmp_path_factory.mktemp("fixed")
    with chdir(folder):
        train("fixed", "--workers", "1")
    return folder / "runs" / "fixed"


@pytest.fixture
def fixed(runs: Path, one_worker: Path) -> None:
    """This record, among the runs of a test."""
    runs.mkdir()
    (runs / "fixed").symlink_to(one_worker)


def test_workers_join_after_an_epoch_and_within_one(fixed: None) -> None:
    said = train("x", "--workers-schedule", "0:1 1:2 1.5:3", "--save-best", "--monitor", "loss", "--keep", "9")
    assert bits("x") == bits("fixed")
    assert rows("x", "step", "epoch") == rows("fixed", "step", "epoch"), "a row is missing, repeated or different"
    assert sum(row["steps"] for row in rows("x", "health")) == 21, "the steps before a join are timed, too"
    assert Path("runs/x/course.csv").read_text().count("\n") == EPOCHS + 1
    assert joined("x") == [(7, 1, 2), (11, 2, 3)], "step 10 starts half a sample before epoch 1.5"
    assert [row["contract"]["workers"] for row in rows("x", "resume")] == [2, 3]
    lines = [line for line in said.splitlines() if line.startswith(("Epoch", "2 workers", "3 workers"))]
    assert [line.split(" =")[0].split(" (")[0] for line in lines] == [
        "Epoch",  # the epoch ends first
        "2 workers from epoch 1 on",
        "3 workers from epoch 1.66 on",
        "Epoch",
        "Epoch",
    ]
    assert said.count("contract") + said.count("resumed") == 0, "a join is one line"
    steps = samples_by_step()
    assert sorted(steps) == list(range(21))
    costs = read_metrics(Path("runs/x"))
    for row in (row for row in costs if row["kind"] == "join"):
        assert list(row["components_s"]) == ["stop", "start", "build", "resume"]
        assert sum(row["components_s"].values()) == pytest.approx(row["join_s"])
    again = paceline("train", "harness.faults:task", "--resume", "x", env={"PYTHONPATH": str(Path(__file__).parents[2])})
    assert "already done" in again.stdout
    assert 'workers_schedule = "0:1 1:2 1.5:3"' in Path("runs/x/config.toml").read_text()


def test_workers_join_as_the_batch_grows(runs: Path) -> None:
    train("fixed", "--workers", "2", *GROWING)
    train("x", "--workers-schedule", "0:1 0.3:2 1.2:1", *GROWING)
    assert bits("x") == bits("fixed")
    assert [(was, workers) for _, was, workers in joined("x")] == [(1, 2), (2, 1)]
    assert rows("x", "step", "epoch", "phase") == rows("fixed", "step", "epoch", "phase")


def test_workers_join_when_the_noise_says_that_the_batch_grows(runs: Path) -> None:
    flags = ("--batch-schedule", "auto:4", "--smallest-part", "1", "--batch-noise-ratio", "1e-6")
    train("fixed", "--workers", "1", *flags)
    said = train("x", "--workers", "auto", "--virtual-workers", "4", *flags)
    assert bits("x") == bits("fixed")
    assert rows("x", "epoch", "phase") == rows("fixed", "epoch", "phase")
    limit = int(Path("runs/x/config.toml").read_text().partition('workers_schedule = "auto:')[2].partition('"')[0])
    grown = [limit * row["global_batch"] // 16 for row in rows("fixed", "phase")]
    expected = [max(1, count) for count in grown]
    assert [workers for _, _, workers in joined("x")] == sorted(set(expected[1:]) - {expected[0]}), said


def test_a_worker_killed_after_a_join_is_restarted_on_as_many(fixed: None) -> None:
    faults = [fail_at(0, 5, "kill"), fail_at(1, 8, "kill")]
    said = train("x", "--workers-schedule", "0:1 1:2", "--max-restarts", "2", faults=faults)
    assert "restart 1 of 2 on 1 worker\n" in said
    assert "restart 2 of 2 on 2 workers\n" in said
    assert bits("x") == bits("fixed")
    assert rows("x", "step", "epoch") == rows("fixed", "step", "epoch")
    assert joined("x") == [(7, 1, 2)], "a join is no restart, and a restart is no join"


def test_a_stopped_run_continues_on_the_workers_of_its_time(fixed: None) -> None:
    flags = ("--workers-schedule", "0:1 1:2", "--name", "x")
    assert train_with([fail_at(1, 9, "stop")], *flags).returncode == 143
    assert read_result(Path("runs/x"))["status"] == "interrupted"
    train("x", "--resume")  # with the schedule of the record
    assert bits("x") == bits("fixed")
    assert [row["contract"]["workers"] for row in rows("x", "resume")] == [2, 2]
    assert joined("x") == [(7, 1, 2)], "the resumed run did not start on 2 workers"


def test_a_wrong_guess_is_corrected_before_the_first_step(runs: Path) -> None:
    """The launcher does not know that the task has a batch schedule of its own."""
    Path("own.py").write_text(
        "from dataclasses import replace\nfrom harness import faults\n"
        "def task():\n"
        "    made = faults.task()\n"
        "    more = {'batch_schedule': '0:8 1:16', 'smallest_part': 2, 'virtual_workers': 4, 'epochs': 2, 'reduce': 'exact'}\n"
        "    return replace(made, defaults={**made.defaults, **more})\n"
    )
    for name, flags in (("one", ("--workers", "1")), ("x", ("--workers-schedule", "auto:4"))):
        done = paceline("train", "own.py", "--name", name, *flags, env=variables())
        assert done.returncode == 0, done.stderr
    assert joined("x") == [(0, 1, 2), (13, 2, 4)]
    assert bits("x") == bits("one")


def test_without_room_for_a_checkpoint_the_run_goes_on_as_it_is(fixed: None) -> None:
    faults = [fail_at(0, 4, "disk full"), fail_at(0, 8, "disk free")]
    said = train("x", "--workers-schedule", "0:1 1:2 2:3", faults=faults)
    assert "2 workers cannot take over: no checkpoint could be written; the run continues as it is" in said
    assert joined("x") == [(14, 1, 3)]
    assert bits("x") == bits("fixed")


def test_a_mistake_is_one_line(runs: Path) -> None:
    done = train_with([], "--workers-schedule", "0:1 1:8")  # tests/unit/test_joins.py has the others
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]  # others may use these cores
    assert "8 workers from epoch 1 on, but there are 4 virtual workers" in line
    assert not runs.exists() or not list(runs.iterdir())
