"""What the migration pages say a port buys: each script before and after, on 1, 2 and 3 workers."""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.processes import run_workers
from harness.training import train_in
from paceline.dist.world import World
from paceline.training.tasks import resolve
from paceline.training.weights import model_sha256

MIGRATE = Path(__file__).parents[2] / "examples" / "migrate"


def run_main(world: World, name: str, folder: str) -> tuple[str, str]:
    """Run a script's main() in a world that the harness has joined; what it printed, and a hash of what it saved on rank 0."""
    sys.path.insert(0, str(MIGRATE))
    spec = importlib.util.spec_from_file_location(name, MIGRATE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    main = getattr(script.main, "__wrapped__", script.main)
    dist.init_process_group = lambda *_: None
    dist.destroy_process_group = lambda *_: None
    written, path = io.StringIO(), Path(folder) / f"{name}-{world.size}.pt"
    with contextlib.redirect_stdout(written):
        main(path=str(path))
    model = script.Net()
    world.barrier()
    model.load_state_dict(torch.load(path))
    return model_sha256(model), written.getvalue()


def on_1_2_3(name: str, folder: Path) -> list[list[tuple[str, str]]]:
    return [run_workers(run_main, workers, name, str(folder)) for workers in (1, 2, 3)]


@pytest.mark.parametrize("name", ["ddp_after", "accelerate_after"])
def test_the_script_after_has_one_hash_and_counts_every_sample(name: str, tmp_path: Path) -> None:
    found = on_1_2_3(name, tmp_path)
    assert len({hashed for workers in found for hashed, _ in workers}) == 1
    logs = [[said for _, said in workers] for workers in found]
    assert all(workers[1:] == [""] * (len(workers) - 1) for workers in logs), "only rank 0 prints"
    assert len({workers[0] for workers in logs}) == 1, "the same digits"
    assert logs[0][0].count("of 203 samples") == 3


def test_the_ddp_script_before_does_not(tmp_path: Path) -> None:
    found = on_1_2_3("ddp_before", tmp_path)
    assert len({workers[0][0] for workers in found}) == 3, "three models"
    assert [workers[0][1].split(" of ")[-1].strip() for workers in found] == ["203 samples", "204 samples", "204 samples"]


def task(world: World, folder: str, steps: int, resumes: bool) -> tuple[str, dict[str, float]]:
    options = {"checkpoint_every": "4", **({"max_steps": steps} if steps else {})}
    trained = train_in(world, resolve(str(MIGRATE / "lightning_after.py"), {})[0], options, Path(folder), resumes)
    return trained.result.model_sha256, trained.result.metrics


def test_the_task_has_one_hash_and_continues_on_another_number_of_workers(tmp_path: Path) -> None:
    folders = [str(tmp_path / str(workers)) for workers in (1, 2, 3)]
    found = [run_workers(task, workers, folders[workers - 1], 0, False)[0] for workers in (1, 2, 3)]
    assert all(each == found[0] for each in found)
    run_workers(task, 2, str(tmp_path / "cut"), 22, False)
    assert run_workers(task, 3, str(tmp_path / "cut"), 0, True) == [found[0]] * 3
