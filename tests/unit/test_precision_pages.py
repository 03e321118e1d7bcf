"""docs/precision.md and docs/lr-find.md: their task trains as they say, and their numbers are measured ones."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.training import train_in
from paceline.dist.world import world

ROOT = Path(__file__).parents[2]


def of_page() -> dict[str, Any]:
    """The names that the page's code defines."""
    found: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "precision.md").read_text(), re.S)
    exec(blocks[0], found)
    return found


def saved_bytes(net: nn.Module) -> int:
    """Bytes that autograd holds between the forward and the backward pass, weights left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*net.parameters(), *net.buffers())}
    held: dict[int, tuple[Tensor, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = tensor, storage.nbytes()  # held, so that its memory is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net.train()(torch.randn(600, 20))
    return sum(size for _, size in held.values())


def test_the_pages_model_is_the_same_with_and_without_checkpointing() -> None:
    task, options = of_page()["task"], {"reduce": "exact", "virtual_workers": 2, "epochs": 2, "global_batch": 60}
    with world() as here:
        one, other = (train_in(here, task(recompute), options) for recompute in (True, False))
    assert one.result.model_sha256 == other.result.model_sha256
    assert one.result.metrics["accuracy"] > 0.5


def test_the_saved_memory_is_what_the_page_says() -> None:
    net = of_page()["Net"]
    sizes = [f"{saved_bytes(net(recompute)) / 2**20:.1f} MiB" for recompute in (True, False)]
    assert sizes == re.findall(r"\bholds ([\d.]+ MiB)", (ROOT / "docs" / "precision.md").read_text())


def test_the_table_of_recommendations_is_the_committed_result() -> None:
    page, found = (ROOT / "docs" / "lr-find.md").read_text(), json.loads((ROOT / "bench/results/lr_find.json").read_text())
    for case in found["cases"]:
        complete = [each for each in case["tried"] if None not in each["accuracy"]]
        best = max(complete, key=lambda each: statistics.mean(each["accuracy"]))
        spread = [
            f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
            for values in ([each["accuracy"] for each in case["recommended"]], best["accuracy"])
        ]
        lrs = ", ".join(f"{each['base_lr']:g}" for each in case["recommended"])
        assert f"| `{case['flags']}` | {lrs} | {spread[0]} | {best['base_lr']:g} | {spread[1]} |" in page
