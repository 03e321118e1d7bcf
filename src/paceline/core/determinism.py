"""What else it takes for one part's gradient to have the same bits wherever it is computed (`--reduce exact`).

On CPUs, sums inside a layer are split among threads, so bits depend on their number: exact mode uses one thread a worker (more
cores are used by more workers). On GPUs, some kernels add in whatever order their blocks finish: exact mode takes deterministic
ones, and torch raises where an operation has none.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.config import Config


@contextmanager
def same_bits(config: Config) -> Iterator[None]:
    """Under `--reduce exact`, run the block so that its results do not depend on the place; else do nothing."""
    if config.reduce != "exact":
        yield
        return
    # Read when cuBLAS starts; without it torch refuses matrix products in deterministic mode.
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    threads = torch.get_num_threads()
    deterministic, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, fill = torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # or the choice of algorithm would depend on timings
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if workspace is None:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]
        else:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn)
        torch.backends.cudnn.benchmark = benchmark
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
