"""A trained model on 1, 2 and 3 workers: the same metrics, the same bytes of predictions, the same weights to start from."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from harness.processes import run_workers
from harness.training import blobs, train_in
from paceline.core.determinism import deterministic
from paceline.dist.world import World
from paceline.training.after import Request, evaluate
from paceline.training.predictions import predict
from unit.training.test_after import TASK


@pytest.fixture
def record(runs: Path) -> str:
    Path("my.py").write_text(TASK)
    paceline.train("my.py:task", epochs=1, name="x", virtual_workers=2)
    return str((runs / "x").resolve())


def look(world: World, folder: str, record: str) -> tuple[Any, str]:
    """The metrics on every worker, and a hash of the file that rank 0 writes."""
    import os

    os.chdir(folder)
    to = Path(f"p{world.size}.npz")
    with deterministic():
        metrics = evaluate(Request(record=record), world)["metrics"]
        predict(Request(record=record, data="train"), to, False, world)
    return metrics, hashlib.sha256(to.read_bytes()).hexdigest() if world.is_main else ""


def test_metrics_and_predictions_are_the_same_on_1_2_and_3_workers(record: str) -> None:
    own = json.loads((Path(record) / "result.json").read_text())["metrics"]
    found = [run_workers(look, workers, str(Path.cwd()), record) for workers in (1, 2, 3)]
    assert all(metrics == own for each in found for metrics, _ in each)
    assert len({each[0][1] for each in found}) == 1


def start(world: World, path: str) -> dict[str, Any]:
    """Train from given weights, which only rank 0 can read."""
    given = path if world.is_main else "/nowhere.pt"
    return train_in(world, blobs(norm=True), {"reduce": "exact", "virtual_workers": 3, "epochs": 1, "init_from": given}).weights


def test_every_worker_starts_from_rank_0s_weights(tmp_path: Path) -> None:
    state = blobs(norm=True).model().state_dict()  # type: ignore[misc]
    torch.save({f"module.{name}": torch.rand(value.shape).to(value.dtype) for name, value in state.items()}, tmp_path / "w.pt")
    found = [weights for workers in (1, 2, 3) for weights in run_workers(start, workers, str(tmp_path / "w.pt"))]
    for weights in found[1:]:
        assert all((weights[name] == found[0][name]).all() for name in weights)


STREAM = """
from paceline import Stream

def blocks(shard, shards, epoch):
    samples = [data(count=101)[i] for i in range(101)]
    files = [samples[i : i + 11] for i in range(0, 101, 11)]
    for file in files[shard::shards]:
        yield from file

def stream():
    return Stream(blocks, samples=101)
"""


def look_at_stream(world: World, folder: str, record: str) -> str:
    import os

    os.chdir(folder)
    to = Path(f"s{world.size}.npz")
    with deterministic():
        predict(Request(record=record, data="my.py:stream"), to, False, world)
    return hashlib.sha256(to.read_bytes()).hexdigest() if world.is_main else ""


def test_a_stream_is_predicted_in_its_own_order_on_any_number_of_workers(record: str) -> None:
    """Not split by worker: its shards would be other files, with other numbers of samples."""
    Path("my.py").write_text(TASK + STREAM)
    found = [run_workers(look_at_stream, workers, str(Path.cwd()), record)[0] for workers in (1, 2, 3)]
    assert len(set(found)) == 1
