"""On a machine that has Accelerate and Lightning: the scripts before a migration run, and end near those after it."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from harness.processes import paceline, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]
MIGRATE = Path(__file__).parents[2] / "examples" / "migrate"
NEAR = 0.05  # of the accuracy: 10 of 203 samples


def accuracy(text: str) -> float:
    found = re.findall(r"accuracy'?:? (?:tensor\()?(\d\.\d+)", text)
    assert found, text
    return float(found[-1])


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate: pip install accelerate")
def test_accelerate_before_and_after_end_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    cpu = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1"}
    found = [run([*launch, str(MIGRATE / f"accelerate_{when}.py")], env=cpu) for when in ("before", "after")]
    assert [done.returncode for done in found] == [0, 0], found[0].stderr + found[1].stderr
    before, after = (accuracy(done.stdout) for done in found)
    assert abs(before - after) < NEAR


@pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning: pip install lightning")
def test_lightning_before_and_after_end_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cpu = {"CUDA_VISIBLE_DEVICES": ""}
    done = run([sys.executable, str(MIGRATE / "lightning_before.py"), "1"], env=cpu)
    assert done.returncode == 0, done.stderr
    after = paceline("train", str(MIGRATE / "lightning_after.py"), "--workers", "2", env=cpu)
    assert after.returncode == 0, after.stderr
    assert abs(accuracy(done.stdout) - accuracy(after.stdout)) < NEAR
    losses = [float(re.findall(r"loss'?:? (?:tensor\()?(\d\.\d+)", text)[-1]) for text in (done.stdout, after.stdout)]
    assert abs(losses[0] - losses[1]) < NEAR
