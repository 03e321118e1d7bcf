"""On a real GPU: evaluate, predict and load a record; gather with NCCL; start from given weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline as package
from harness.processes import paceline
from paceline.core.exact_mean import Chunks
from paceline.core.in_order import gather_in_order
from paceline.dist.world import world
from unit.training.test_after import TASK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]


@pytest.fixture
def metrics(runs: Path) -> dict[str, Any]:
    """Of a run in exact mode on a GPU."""
    Path("my.py").write_text(TASK)
    done = paceline("train", "my.py:task", "--epochs", "1", "--name", "x", "--virtual-workers", "2")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((runs / "x" / "result.json").read_text())["metrics"]
    return found


def test_metrics_and_predictions_on_one_and_two_workers(metrics: dict[str, Any]) -> None:
    """Two workers share the GPU, over gloo."""
    for more in ((), ("--workers", "2", "--backend", "gloo")):
        done = paceline("evaluate", "x", "--json", *more)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["metrics"] == pytest.approx(metrics, rel=1e-5)
        done = paceline("predict", "x", "--to", f"p{len(more)}.npy", *more)
        assert done.returncode == 0, done.stderr
    assert Path("p0.npy").read_bytes() == Path("p4.npy").read_bytes()
    model = package.load("x")
    with torch.no_grad():
        inputs = torch.randn(33, 1, 6, 6, generator=torch.Generator().manual_seed(1))
        np.testing.assert_allclose(np.load("p0.npy"), model(inputs).numpy(), atol=0.02)  # predicted in bf16


def test_a_run_starts_from_the_weights_of_a_record(metrics: dict[str, Any], runs: Path) -> None:
    done = paceline("train", "my.py:task", "--epochs", "1", "--name", "y", "--init-from", "x")
    assert done.returncode == 0, done.stderr
    assert "all 9 tensors" in done.stdout
    done = paceline("train", "my.py:task", "--branch-from", "x", "--epochs", "2", "--name", "z")
    assert done.returncode == 0, done.stderr
    done = paceline("train", "my.py:task", "--resume", "x", "--epochs", "2")
    assert done.returncode == 0, done.stderr
    hashes = {json.loads((runs / name / "result.json").read_text())["model_sha256"] for name in ("x", "z")}
    assert len(hashes) == 1


def test_tensors_of_a_gpu_arrive_on_the_cpu() -> None:
    with world() as here:
        (found,) = gather_in_order(Chunks(3, 3, here), [{"x": torch.arange(3, device=here.device)}])
    assert found["x"].device.type == "cpu"
    assert found["x"].tolist() == [0, 1, 2]
