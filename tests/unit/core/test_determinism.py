"""What exact mode changes about this process while it trains, and that it puts everything back."""

import os

import torch

from paceline.core.determinism import deterministic


def settings() -> tuple[object, ...]:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


def test_one_thread_and_deterministic_kernels_and_all_as_before() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        before = settings()
        with deterministic():
            assert settings() == (1, True, False, False, ":4096:8")
            with deterministic():  # building and training each ask for it
                pass
            assert settings() == (1, True, False, False, ":4096:8")
        assert settings() == before
        with deterministic(False):
            assert settings() == before, "fast mode changes nothing"
    finally:
        torch.set_num_threads(threads)
