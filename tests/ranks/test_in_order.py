"""What several workers computed for each chunk reaches rank 0 in the order of the chunks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.processes import run_workers
from paceline.core.exact_mean import Chunks
from paceline.core.in_order import gather_in_order
from paceline.dist.messages import is_lost_contact
from paceline.dist.world import World

KINDS = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64)


def collected(world: World, samples: int, size: int) -> list[Any]:
    """Gather trees whose shapes and dtypes differ from chunk to chunk, as plain values."""
    chunks = Chunks(samples, size, world)

    def trees() -> Iterator[Any]:
        for number, mine in zip(chunks.numbers, chunks.mine, strict=True):
            odd = torch.ones(number, 3, dtype=torch.bool)  # odd sizes: what follows is not aligned
            yield {"x": (torch.from_numpy(mine).to(KINDS[number % 5]), odd), "scalar": torch.tensor(float(number)), "n": number}

    found = list(gather_in_order(chunks, trees()))
    return [
        (str(tree["x"][0].dtype), tree["x"][0].tolist(), list(tree["x"][1].shape), tree["scalar"].item(), tree["n"])
        for tree in found
    ]


@pytest.mark.parametrize("samples", [23, 3], ids=["uneven chunks", "a worker without a chunk"])
def test_trees_arrive_in_order_on_2_and_3_workers(samples: int) -> None:
    alone, *_ = run_workers(collected, 1, samples, 3)
    assert [row[4] for row in alone] == list(range(-(-samples // 3)))
    for workers in (2, 3):
        main, *others = run_workers(collected, workers, samples, 3)
        assert main == alone
        assert others == [[]] * (workers - 1), "only rank 0 gets the trees"


def failing(world: World, culprit: int) -> tuple[str, bool]:
    """What each worker raises if one of them fails in its second chunk."""
    chunks = Chunks(12, 2, world)

    def trees() -> Iterator[Any]:
        for number in chunks.numbers:
            if world.rank == culprit and number >= world.size:
                raise KeyError("broken")
            yield torch.ones(2)

    try:
        list(gather_in_order(chunks, trees()))
    except Exception as error:
        world.barrier()  # nobody has ended, and nobody is stuck in a collective
        return type(error).__name__, is_lost_contact(error)
    return "", False


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_on_one_worker_ends_the_others_too(culprit: int) -> None:
    found = run_workers(failing, 2, culprit, timeout_s=30)
    assert found[culprit] == ("KeyError", False)
    assert found[1 - culprit] == ("RuntimeError", True), "its error counts as lost contact: the other's is shown"
