"""`torch.utils.checkpoint` inside a task's model: the same bits as without it, for dropout and batch norm, on any number of
workers."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.processes import run_workers
from harness.training import Trained, blobs, train_in
from paceline.dist.world import World
from paceline.training.task import Task


class Net(nn.Module):
    """Two blocks with batch norm and dropout after an input layer; `how` recomputes the blocks in the backward pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)) for _ in range(2)
        )
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.how == "plain" else checkpoint(block, x, use_reentrant=self.how == "reentrant")
        found: Tensor = self.last(x)
        return found


def task(how: str) -> Task:
    made = blobs(samples=96)
    return Task(**{**vars(made), "model": partial(Net, how)})


OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"reduce": "exact"},
    "exact, two at once": {"reduce": "exact", "parts_at_once": 2},
    "exact, micro-batches": {"reduce": "exact", "accumulate": 2, "global_batch": 24},
    "exact, local steps": {"reduce": "exact", "local_steps": 2, "local_after": 0.5},
    "fast": {"max_steps": 3, "base_lr": 0.02, "check_every": 1},
    "fast, averaged": {"max_steps": 3, "base_lr": 0.02, "ema": 0.9},
}


def train(here: World) -> dict[tuple[str, str], Trained]:
    options = {"virtual_workers": 4, "epochs": 2}
    ways = ("plain", "not reentrant", "reentrant")
    found = {(case, how): train_in(here, task(how), {**options, **more}) for case, more in OPTIONS.items() for how in ways}
    # Reentrant checkpoints refuse torch.autograd.grad, which SAM needs.
    for how in ways[:2]:
        found["exact, sharpness-aware", how] = train_in(here, task(how), {**options, "reduce": "exact", "sam_rho": 0.05})
    return found


def test_checkpointing_changes_no_bit_in_exact_mode_and_only_rounding_in_fast_mode() -> None:
    (alone,), team = run_workers(train, 1), run_workers(train, 2)
    for (case, how), trained in alone.items():
        plain = alone[case, "plain"]
        assert trained.result.model_sha256 == plain.result.model_sha256, f"{case}, {how}: one worker"
        counts = {int(value) for name, value in trained.weights.items() if "num_batches" in name}
        assert counts == {int(value) for name, value in plain.weights.items() if "num_batches" in name}, f"{case}, {how}"
        for worker in team:
            if case.startswith("exact"):
                assert worker[case, how].result.model_sha256 == plain.result.model_sha256, f"{case}, {how}: two workers"
            for name, value in worker[case, how].weights.items():
                np.testing.assert_allclose(value, plain.weights[name], atol=1e-4, err_msg=f"{case}, {how}: {name}")


def saved_bytes(how: str) -> int:
    """Bytes that autograd holds between the forward and the backward pass, weights left out."""
    torch.manual_seed(0)
    net = Net(how).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*net.parameters(), *net.buffers())}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = net(torch.randn(512, 5))
    out.sum().backward()
    return sum(held.values())


def test_checkpointing_saves_memory() -> None:
    assert saved_bytes("not reentrant") < 0.5 * saved_bytes("plain")
