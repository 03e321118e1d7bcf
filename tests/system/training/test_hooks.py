"""Hooks and early stops on several workers: one model on any number of them, and an error that ends them all."""

from pathlib import Path
from typing import Any

from harness.processes import paceline, run_workers
from harness.training import blobs, train_in
from paceline import Hooks, Moment
from paceline.dist.world import World, world
from paceline.errors import UsageError
from paceline.records import read_result

OPTIONS = {
    "reduce": "exact",
    "virtual_workers": 6,
    "global_batch": 24,
    "epochs": 8,
    "checkpoint_every": "5",
    "base_lr": 0.5,
    "schedule": "constant",
    "monitor": "accuracy",
    "stop_after": 2,
}


def shrink(moment: Moment) -> None:
    """Changes the weights in place after every step."""
    for parameter in moment.model.parameters():
        parameter.mul_(0.999)


def train_here(here: World, folder: str, most_steps: int, resumes: bool) -> dict[str, Any]:
    """One worker: what it ended with, and on which ranks its hooks were called."""
    called: list[int] = []
    change = Hooks(on_step=shrink, every_rank=True, changes_model=True)
    look = Hooks(on_epoch=lambda moment: called.append(moment.rank))
    task = blobs(norm=True, dropout=0.2, hooks=[change, look])
    options = {**OPTIONS, **({"max_steps": most_steps} if most_steps else {})}
    trained = train_in(here, task, options, Path(folder), resumes)
    result = trained.result
    return {
        "status": result.status,
        "sha": result.model_sha256,
        "best": dict(result.best),
        "epochs": result.epochs,
        "called": called,
    }


def test_one_model_and_one_end_on_any_number_of_workers(tmp_path: Path) -> None:
    with world() as here:
        alone = train_here(here, str(tmp_path / "1"), 0, False)
    assert alone["status"] == "stopped early"
    assert alone["epochs"] == alone["best"]["epoch"] + 2 < 8
    two = run_workers(train_here, 2, str(tmp_path / "2"), 0, False)
    assert [set(each["called"]) for each in two] == [{0}, set()], "only rank 0 calls it"
    cut = 5 * alone["best"]["epoch"] + 2  # between the best epoch and the end, within an epoch
    run_workers(train_here, 3, str(tmp_path / "3"), cut, False)
    three = run_workers(train_here, 3, str(tmp_path / "3"), 0, True)
    for each in (*two, *three):
        assert {**each, "called": 0} == {**alone, "called": 0}


TASK = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from harness.training import blobs
from paceline import Hooks

def my_hook(moment):
    if moment.step == 13 and not Path("fixed").exists():
        raise KeyError("no such thing")

def task():
    return blobs(hooks=Hooks(on_step=my_hook))
"""


def test_an_error_in_a_hook_of_rank_0_ends_all_workers(runs: Path) -> None:
    """Then the run is resumed, and has the best epoch from before the error."""
    Path("mine.py").write_text(TASK.format(tests=str(Path(__file__).parents[2])))
    flags = [
        "--workers",
        "2",
        "--reduce",
        "exact",
        "--checkpoint-every",
        "6",
        "--save-best",
        "--monitor",
        "loss",
        "--mode",
        "max",
    ]
    done = paceline("train", "mine.py", "--name", "x", "--timeout-s", "60", *flags, timeout_s=110)
    assert done.returncode == 1, done.stderr
    assert "worker 0 failed first: KeyError: 'no such thing'" in done.stderr
    assert "mine.py, line 10, in my_hook" in done.stderr
    result = read_result(runs / "x")
    assert (result["status"], result["steps"], result["best"]["epoch"]) == ("failed", 13, 1)
    Path("fixed").touch()
    done = paceline("train", "mine.py", "--resume", "x", timeout_s=110)
    assert done.returncode == 0, done.stderr
    assert (read_result(runs / "x")["best"]["epoch"], result["best"]["file"]) == (1, "best.safetensors")
    assert "after epoch 1, in best.safetensors" in done.stdout


def watch_wrongly(here: World) -> str:
    try:
        train_in(here, blobs(), {"monitor": "acc", "stop_after": 2})
    except UsageError as error:
        return str(error)
    return ""


def test_a_metric_that_does_not_exist_is_the_same_error_on_all_workers() -> None:
    one, two = run_workers(watch_wrongly, 2)
    assert one == two
    assert one.startswith("unknown validation metric for --monitor 'acc'")
