"""The exact sum over real workers has the bits of one worker."""

from typing import Any

import pytest
import torch

from harness.processes import run_workers
from paceline.core import exact_sum as reduce
from paceline.core.exact_sum import ExactReducer
from unit.core.test_exact_sum import _bits


@pytest.mark.parametrize("workers", [2, 3])
def test_real_workers_have_the_bits_of_one(workers):
    alone = [_steps(None, parts) for parts in (7, workers)]
    for results in run_workers(_both, workers, workers):
        assert results == alone


def _both(world: Any, workers: int) -> list[list[list[bytes]]]:
    """With several parts a worker, and with one."""
    return [_steps(world, parts) for parts in (7, workers)]


def _steps(world: Any, parts: int) -> list[list[bytes]]:
    """Three steps of `parts` parts, of which this worker has every size-th; no world is a world of one."""
    rank, size = (world.rank, world.size) if world else (0, 1)
    reduce._CHUNK = 20
    shapes = [(5, 4), (), (3,), (0,), (30,)]
    reducer = ExactReducer([torch.zeros(shape) for shape in shapes], parts)
    results = []
    try:
        for step in range(3):
            for part in range(rank, parts, size):
                generator = torch.Generator().manual_seed(100 * step + part)
                reducer.add([torch.randn(shape, generator=generator) * 10.0 ** (7 * (part - step)) for shape in shapes])
            results.append([_bits(total) for total in reducer.finish()])
    finally:
        reduce._CHUNK = 1 << 22
    return results
