"""On a real GPU: `paceline.Parts` in a loop of one's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from harness.processes import run_workers
from paceline.dist.world import World
from paceline.training.weights import model_sha256

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]


def train(world: World, reduce: str) -> tuple[str, list[float], float]:
    """Train on the GPU as one of the workers that share it; the world's own device is a CPU."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(200, 1, 8, 8, generator=generator).cuda(), (torch.arange(200) % 3).cuda()
    conv = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 3))
    model = conv.cuda()
    team = paceline.Parts(model, samples=200, global_batch=48, virtual_workers=4, reduce=reduce, seed=1)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for epoch in range(2):
        for step in team.epoch(epoch):
            for part in step:
                with torch.autocast("cuda", torch.bfloat16):
                    loss = F.cross_entropy(model(x[part.samples]), y[part.samples])
                part.backward(loss)
            losses.append(step.reduce()["loss"].item())
            optimizer.step()
            optimizer.zero_grad()
    score = team.evaluate(200, lambda samples: {"loss": F.cross_entropy(model(x[samples]), y[samples], reduction="none")})
    return model_sha256(model), losses, score["loss"]


def test_exact_mode_gives_the_same_bits_on_1_2_and_3_workers_that_share_a_gpu() -> None:
    found = [result for workers in (1, 2, 3) for result in run_workers(train, workers, "exact")]
    assert found == [found[0]] * 6


def test_fast_mode_agrees_to_rounding() -> None:
    (_, alone, score), (_, pair, other) = (run_workers(train, workers, "fast")[0] for workers in (1, 2))
    assert alone == pytest.approx(pair, rel=0.02)
    assert score == pytest.approx(other, rel=0.02)
