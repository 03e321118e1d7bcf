"""On a real GPU: a task's own step function, and a script's DataLoader in `Parts`."""

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as library
from harness.processes import paceline, run_workers
from paceline.dist.world import World
from paceline.records import read_result
from paceline.training.weights import model_sha256

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_gan_runs_without_a_graph_says_why_and_has_one_hash(runs: Path) -> None:
    flags = ("--max-steps", "40", "--reduce", "exact", "--backend", "gloo")
    for workers in ("1", "2"):
        done = paceline("train", str(EXAMPLES / "gan.py"), "--workers", workers, "--name", f"on-{workers}", *flags)
        assert done.returncode == 0, done.stderr
        assert "the step runs without a CUDA graph: the task has a step function of its own" in done.stdout
    assert read_result(runs / "on-1")["model_sha256"] == read_result(runs / "on-2")["model_sha256"]


def test_the_gan_trains_in_bf16(runs: Path) -> None:
    done = paceline("train", str(EXAMPLES / "gan.py"), "--epochs", "2", "--precision", "bf16", "--name", "bf16")
    assert done.returncode == 0, done.stderr
    assert read_result(runs / "bf16")["metrics"]["loss"] < 0.5, "the untrained generator is at 1.3"


def with_loader(world: World) -> tuple[str, dict[str, float], Any]:
    """Batches come to the model's device by themselves, pinned or not."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).cuda()
    data = TensorDataset(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 3)
    team = library.Parts(model, DataLoader(data, batch_size=12, pin_memory=True), virtual_workers=4, reduce="exact", seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in team.epoch(0):
        step.backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
        optimizer.step()
    loader, hits = DataLoader(data, batch_size=20), 0
    for x, y in team.deal(loader):
        hits += (model(x).argmax(1) == y).sum().item()
    exact = team.evaluate(loader, lambda batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]})
    return model_sha256(model), exact, library.total(hits)


def test_a_loaders_batches_are_on_the_gpu() -> None:
    found = [result for workers in (1, 2) for result in run_workers(with_loader, workers)]
    assert all(other == found[0] for other in found[1:])
    _, exact, hits = found[0]
    assert exact["accuracy"] == pytest.approx(hits / 50)


def test_the_port_of_examples_mnist_runs_on_a_gpu() -> None:
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLES / "mnist" / "own_loop.py")
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        model = script.main(["--epochs", "1", "--dry-run"])
    assert next(model.parameters()).is_cuda
    assert written.getvalue().count("Train Epoch: ") == 1
