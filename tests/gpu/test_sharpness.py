"""On a real GPU: `paceline sharpness` finds what it finds on a CPU, on one worker and on two that share the GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as package
from harness.processes import paceline
from ranks.test_sharpness import TASK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]
FAST = ("--samples", "60", "--vectors", "6", "--lanczos-steps", "15", "--json")


@pytest.fixture
def on_cpu(runs: Path) -> dict[str, Any]:
    """What a worker without a GPU finds."""
    Path("my.py").write_text(TASK)
    package.train("my.py:task", epochs=2, name="x")
    return look(env={"CUDA_VISIBLE_DEVICES": ""})


def look(*more: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    done = paceline("sharpness", "x", *FAST, *more, env=env)
    assert done.returncode == 0, done.stderr
    Path("runs/x/sharpness.json").unlink()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("more", [(), ("--workers", "2", "--backend", "gloo")])
def test_a_gpu_finds_what_a_cpu_finds(on_cpu: dict[str, Any], more: tuple[str, ...]) -> None:
    """To float32's rounding: TF32 would differ by a thousandth."""
    found = look(*more)
    assert found["loss"] == pytest.approx(on_cpu["loss"], rel=1e-5)
    for name in ("sam", "adaptive"):
        assert found[name]["rise"] == pytest.approx(on_cpu[name]["rise"], rel=1e-3)
    assert found["hessian"]["top"] == pytest.approx(on_cpu["hessian"]["top"], rel=1e-4)
    assert found["hessian"]["trace"] == pytest.approx(on_cpu["hessian"]["trace"], rel=1e-4)
    for ours, theirs in zip(found["keskar"], on_cpu["keskar"], strict=True):
        assert ours["sharpness"] == pytest.approx(theirs["sharpness"], rel=2e-3)
