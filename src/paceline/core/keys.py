"""Random numbers that belong to a sample or a part, never to a rank (law 3).

A key is a 64-bit hash of (seed, epoch or step, sample or part). It is computed by integer arithmetic alone (splitmix64), in
numpy for orders and in torch for batches on the device. So it is the same on every device, version and number of workers.
"""

import random

import numpy as np
import torch
from torch import Tensor

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def key(*numbers: int) -> int:
    """A 64-bit key of some numbers, such as `key(seed, epoch)` or `key(seed, step, part)`."""
    state = 0
    for number in numbers:
        state = _mix((state ^ (number & _MASK)) & _MASK)
    return state


def keys_numpy(base: int, indices: np.ndarray) -> np.ndarray:
    """`key(..., index)` for every index, where `base = key(...)`."""
    with np.errstate(over="ignore"):
        z = (indices.astype(np.uint64) ^ np.uint64(base)) + np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
        return np.asarray(z ^ (z >> np.uint64(31)))


def keys_torch(base: int | Tensor, indices: Tensor) -> Tensor:
    """The same on the indices' device, as int64 (the bits are those of `keys_numpy`)."""
    z = (indices ^ (base if isinstance(base, Tensor) else _signed(base))) + _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_MIX1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX2)
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


def _mix(x: int) -> int:
    z = (x + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift(z: Tensor, bits: int) -> Tensor:
    """A logical right shift. torch's own shift copies the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
