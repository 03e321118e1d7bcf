"""Weighted draws: by (seed, epoch) alone, as often as the weights say, and each with its own number."""

from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.keyed import KeyedDataset
from paceline.core.sampler import Sampler
from paceline.errors import UsageError

WEIGHTS = [1.0, 0.0, 3.0, 4.0, 0.0]


def test_draws_follow_from_seed_and_epoch_alone() -> None:
    orders = [Sampler(40, 8, parts, 0, WEIGHTS).order(2).tolist() for parts in (1, 2, 4)]
    assert orders[0] == orders[1] == orders[2]
    others = {tuple(Sampler(40, 8, 2, seed, WEIGHTS).order(epoch)) for seed in range(3) for epoch in range(3)}
    assert len(others) == 9


@pytest.mark.parametrize("weights", [WEIGHTS, np.array(WEIGHTS), torch.tensor(WEIGHTS)])
def test_frequencies_are_the_weights(weights: Any) -> None:
    sampler = Sampler(80_000, 8, 2, 0, weights)
    counts = np.bincount(sampler.rows(sampler.order(0)), minlength=5)
    assert counts.tolist() == pytest.approx([10_000, 0, 30_000, 40_000, 0], rel=0.03)
    assert counts[1] == counts[4] == 0


def test_every_draw_has_its_own_number() -> None:
    sampler = Sampler(1000, 8, 2, 0, WEIGHTS)
    order = sampler.order(0)
    assert len(set(order.tolist())) == 1000
    for row in (0, 2, 3):
        repeats = (order[order % 5 == row] // 5).tolist()
        assert repeats == list(range(len(repeats))), "repetitions are counted in the order of the epoch"


class Noise:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, sample: int) -> tuple[int, float]:
        return sample, float(torch.rand(()))


def test_a_sample_drawn_twice_gets_different_noise() -> None:
    keyed = KeyedDataset(Noise(), 0, repeats=True)
    found = keyed.__getitems__([(0, 3), (0, 8), (0, 13)])
    assert [sample for sample, _ in found] == [3, 3, 3]
    assert len({noise for _, noise in found}) == 3
    assert found[0] == KeyedDataset(Noise(), 0).__getitems__([(0, 3)])[0]


def test_the_last_sample_with_a_weight_is_the_last_that_rounding_can_choose() -> None:
    sampler = Sampler(2000, 8, 2, 0, [1e-300, 1e300, 0.0])
    assert set(sampler.rows(sampler.order(0)).tolist()) == {1}


def test_a_stream_has_no_weights() -> None:
    with pytest.raises(UsageError, match="a stream cannot be sampled by weights"):
        Sampler(8, 4, 2, 0, [1.0] * 8, dealt=True)


@pytest.mark.parametrize("weights", [[], [[1.0]], ["a"], [float("nan")], [float("inf"), 1.0]])
def test_mistakes(weights: Any) -> None:
    with pytest.raises(UsageError, match="weight"):
        Sampler(8, 4, 2, 0, weights)
