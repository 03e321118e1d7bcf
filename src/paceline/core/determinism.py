"""What exact mode needs from torch: one part's gradient must have the same bits wherever it is computed (`reduce="exact"`).

On CPUs, sums inside a layer are split among threads, so bits depend on the number of threads. Exact mode uses one thread per
worker; start more workers to use more cores. On GPUs, some kernels add in the order in which their blocks finish. Exact mode
uses deterministic kernels, and torch raises an error for an operation that has none.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def set_deterministic() -> None:
    """Make this process compute the same bits as any other: one CPU thread, deterministic kernels. Stays until changed."""
    # cuBLAS reads it when it starts; without it torch refuses matrix products in deterministic mode.
    os.environ[_WORKSPACE] = ":4096:8"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # or the choice of algorithm would depend on timings
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def deterministic(on: bool = True) -> Iterator[None]:
    """Run the block under `set_deterministic`, then restore the settings. With `on=False`, do nothing."""
    if not on:
        yield
        return
    workspace = os.environ.get(_WORKSPACE)
    threads = torch.get_num_threads()
    algorithms, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, fill = torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    set_deterministic()
    try:
        yield
    finally:
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
        else:
            os.environ[_WORKSPACE] = workspace
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(algorithms, warn_only=warn)
        torch.backends.cudnn.benchmark = benchmark
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
