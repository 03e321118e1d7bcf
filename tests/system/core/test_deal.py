"""Batch-norm statistics of parts on real workers: those of one worker."""

import numpy as np
import pytest
import torch

from harness.processes import run_workers
from paceline.core.deal import deal_parts
from paceline.core.norms import group_batch_norms
from paceline.core.statistics import Statistics
from paceline.dist.world import World
from unit.core import test_deal as unit_tests
from unit.core.test_deal import V, expected_rows, make_model, mean_of, same_bits, train

one_thread = unit_tests.one_thread


@pytest.mark.parametrize("workers", [2, 3])
def test_real_workers_have_the_statistics_of_one(workers):
    expected = mean_of(expected_rows(1, epochs=2))
    for in_turn, together, table in run_workers(_work, workers):
        assert same_bits({name: torch.from_numpy(buffer) for name, buffer in in_turn.items()}, expected)
        torch.testing.assert_close({name: torch.from_numpy(buffer) for name, buffer in together.items()}, expected)
        assert table.shape == (V, 2 * (3 + 4 + 4 + 4))
        assert np.array_equal(table.mean(0)[:3].astype(np.float32), in_turn["0.running_mean"])


def _work(world: World) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """The model's buffers after two epochs in turn and two together, and everybody's rows of the first."""
    buffers, tables = [], []
    for at_once in (1, 2):
        model = make_model() if at_once == 1 else group_batch_norms(make_model())
        groups = deal_parts(V, world.size, world.rank, at_once, whole_groups=False)
        statistics = Statistics(model, groups, V)
        for epoch in range(2):
            train(model, statistics, groups, 1, epoch)
            statistics.average(world)
        buffers.append({name: buffer.numpy() for name, buffer in model.named_buffers()})  # no tensors: theirs are shared memory
        tables.append(statistics.gather(world)[0].numpy())
    return buffers[0], buffers[1], tables[0]
