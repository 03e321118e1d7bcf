"""A task's own step function on several workers: the GAN of the examples, killed and resumed."""

import json
from pathlib import Path

from harness.processes import paceline, run_workers
from harness.training import train_in
from paceline.dist.world import World
from paceline.errors import PacelineError
from paceline.training.tasks import resolve

GAN = Path(__file__).parents[2] / "examples" / "gan.py"
FLAGS = ("--reduce", "exact", "--max-steps", "24", "--checkpoint-every", "5")
KILLED = f"""
import importlib.util, os, signal
spec = importlib.util.spec_from_file_location("gan", {str(GAN)!r})
gan = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gan)

def step(step, model, optimizers):
    found = gan.step(step, model, optimizers)
    if step.number == 12 and "KILL" in os.environ and os.environ.get("RANK") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return found

def task():
    from dataclasses import replace
    return replace(gan.task(), step=step)
"""


def sha256(record: Path) -> str:
    return str(json.loads((record / "result.json").read_text())["model_sha256"])


def test_the_gan_has_one_hash_on_1_2_and_3_workers_and_after_a_kill(runs: Path) -> None:
    """Between the two optimizer steps of a step, nothing is lost: both optimizers' states are in the checkpoint."""
    Path("killed.py").write_text(KILLED)
    for workers in ("1", "3"):
        done = paceline("train", "killed.py", "--workers", workers, "--name", f"on-{workers}", *FLAGS)
        assert done.returncode == 0, done.stderr
    failed = paceline("train", "killed.py", "--workers", "2", "--name", "killed", *FLAGS, env={"KILL": "1"})
    assert failed.returncode == 1
    assert "worker 1 was killed by SIGKILL" in failed.stderr
    done = paceline("train", "killed.py", "--workers", "2", "--resume", "killed", *FLAGS)
    assert done.returncode == 0, done.stderr
    assert "resume" in (runs / "killed" / "metrics.jsonl").read_text()
    assert len({sha256(runs / name) for name in ("on-1", "on-3", "killed")}) == 1


def local(world: World) -> str:
    task, _ = resolve(str(GAN), {})
    object.__setattr__(
        task,
        "step",
        lambda step, model, optimizers: {"loss": step.backward(lambda batch: model.critic(batch[0]))["loss"] + world.rank},
    )
    try:
        train_in(world, task, {"max_steps": 2})
    except PacelineError as error:
        return str(error)
    return ""


def test_metrics_that_differ_between_workers_are_refused() -> None:
    """They would end a run on one worker, and leave the others waiting."""
    for said in run_workers(local, 2):
        assert "return what step.backward or step.reduce returned" in said
