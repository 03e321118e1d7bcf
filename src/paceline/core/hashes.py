"""Keys without torch: 64-bit hashes of (seed, epoch or step, sample or part), by splitmix64 (see `keys.py`).

Nothing here imports torch, so that `paceline plan` can cut epochs into steps without loading it.
"""

import numpy as np

GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1


def key(*numbers: int) -> int:
    """A 64-bit key of some numbers, such as `key(seed, epoch)` or `key(seed, step, part)`."""
    state = 0
    for number in numbers:
        state = _mix((state ^ (number & MASK)) & MASK)
    return state


def keys_numpy(base: int, indices: np.ndarray) -> np.ndarray:
    """`key(..., index)` for every index, where `base = key(...)`."""
    with np.errstate(over="ignore"):
        z = (indices.astype(np.uint64) ^ np.uint64(base)) + np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX2)
        return np.asarray(z ^ (z >> np.uint64(31)))


def _mix(x: int) -> int:
    z = (x + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * MIX1) & MASK
    z = ((z ^ (z >> 27)) * MIX2) & MASK
    return z ^ (z >> 31)
