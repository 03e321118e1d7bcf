"""Random numbers that belong to a sample or a part, never to a rank (law 3).

A key is a 64-bit hash of (seed, epoch or step, sample or part). It is computed by integer arithmetic alone (splitmix64), in
numpy for orders (`hashes.py`) and in torch for batches on the device. So it is the same on every device, version and number of
workers.
"""

import random

import numpy as np
import torch
from torch import Tensor

from paceline.core.hashes import GOLDEN, MASK, MIX1, MIX2, key, keys_numpy

__all__ = ["key", "keys_numpy", "keys_torch", "on_device", "random_state", "seed_all", "seed_sample", "uniform"]


def keys_torch(base: int | Tensor, indices: Tensor) -> Tensor:
    """The same on the indices' device, as int64 (the bits are those of `keys_numpy`)."""
    z = (indices ^ (base if isinstance(base, Tensor) else _signed(base))) + _signed(GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(MIX1)
    z = (z ^ _shift(z, 27)) * _signed(MIX2)
    return z ^ _shift(z, 31)


def on_device(base: int, device: torch.device) -> Tensor:
    """A key as a tensor, so that a captured step can read another one in each epoch."""
    return torch.full((), _signed(base), dtype=torch.int64, device=device)


def uniform(keys: Tensor, stream: int) -> Tensor:
    """A float32 in [0, 1) for every key; each `stream` gives numbers independent of the others."""
    return _shift(keys_torch(key(stream), keys), 40).to(torch.float32) * 2.0**-24


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seed every generator: for dropout, and anything else that a model, an objective or a `prepare` draws."""
    seed_sample(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(_signed(seed))


def seed_sample(seed: int) -> None:
    """Seed torch, numpy and random: before a user's Dataset makes a sample, so that its augmentation follows the sample."""
    torch.default_generator.manual_seed(_signed(seed))
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def random_state(device: torch.device | None = None) -> bytes:
    """The state of every generator that `seed_all` seeds. It changes when a number is drawn."""
    _, words, position, *_ = np.random.get_state()
    state = [torch.get_rng_state().numpy().tobytes(), np.asarray(words).tobytes(), repr((position, random.getstate())).encode()]
    if device is not None and device.type == "cuda":
        state.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return b"".join(state)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def _shift(z: Tensor, bits: int) -> Tensor:
    """A logical right shift. torch's own shift copies the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
