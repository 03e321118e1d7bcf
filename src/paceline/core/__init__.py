"""The parallel-training core: parts, sampler, keyed randomness, exact sums, per-part batch norm, exact evaluation, schedules.

Owns what makes V virtual workers the same model on any P workers. Usable from anyone's training loop.
May import: dist, config, output, errors. Start reading at `parts.py`, then `sampler.py` and `carrier.py`.
"""
