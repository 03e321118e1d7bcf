"""Loader processes: seeded by sample, kept for all epochs, and gone at the end."""

import gc
import os
import signal
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from harness.processes import children
from paceline.data import processes
from paceline.data.loaders import Feed, Streaming
from unit.data.test_loaders import CPU, INDICES, Noisy


def noise_of(workers: int, indices: list[np.ndarray], epochs: tuple[int | None, ...] = (0,), seed: int = 0) -> dict:
    """(epoch, sample) -> its noise."""
    loader = Streaming(Noisy(), None, CPU, workers, seed)
    found = {}
    for epoch in epochs:
        for batch, samples in zip(loader.batches(indices, epoch), indices, strict=True):
            noise, index, _ = batch
            assert index.tolist() == samples.tolist()
            found |= {(epoch, sample): tuple(row) for sample, row in zip(index.tolist(), noise.tolist(), strict=True)}
    return found


def test_a_samples_noise_follows_the_sample():
    """The same for any number of loader workers and any batching; different in another epoch, seed and in validation."""
    reference = noise_of(0, INDICES, epochs=(0, 1, None))
    assert len(set(reference.values())) == 30
    for column in range(3):
        assert len({noise[column] for noise in reference.values()}) == 30, "one of torch, numpy and random is not keyed"
    ones = [np.array([sample]) for sample in reversed(range(10))]
    assert noise_of(0, ones, epochs=(1, None, 0)) == reference
    assert noise_of(2, INDICES, epochs=(0, 1, None)) == reference
    assert not set(noise_of(0, INDICES, seed=1).values()) & set(reference.values())


def test_processes_outlive_an_epoch_and_end_with_the_loader():
    loader = Streaming(Noisy(), None, CPU, 2, 0)
    makers = [{int(pid) for batch in loader.batches(INDICES, epoch) for pid in batch[2]} for epoch in range(2)]
    assert makers[0] == makers[1]
    assert len(makers[0]) == 2
    assert os.getpid() not in makers[0]
    assert makers[0] <= children(os.getpid()).keys()
    del loader
    gc.collect()
    assert not makers[0] & children(os.getpid()).keys()


def test_start_starts_the_processes_and_they_serve_all_epochs():
    loader = Streaming(Noisy(), None, CPU, 2, 0)
    state = torch.random.get_rng_state()
    loader.start()
    assert torch.equal(torch.random.get_rng_state(), state), "the training's random numbers are not the loader's"
    started = children(os.getpid()).keys()
    assert len(started) == 2
    for epoch in range(2):
        assert {int(pid) for batch in loader.batches(INDICES, epoch) for pid in batch[2]} == started
    loader.close()
    assert not children(os.getpid())
    loader.close()


class Stuck(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        os.write(STUCK[1], b"x")
        time.sleep(1e6)
        return index


STUCK = os.pipe()


def test_a_process_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(processes, "_CLOSE_S", 0.2)
    loader = Streaming(Stuck(), None, CPU, 2, 0)
    loader.start()
    loader._samplers[0].set_epoch(INDICES, 0)
    iter(loader._lanes[0])
    os.read(STUCK[0], 1)
    loader.close()
    assert not children(os.getpid())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_processes_serve_a_worker_that_was_asked_to_stop(number):
    """A terminal and Slurm signal all processes of a run, and the current step still needs its samples."""
    loader = Streaming(Noisy(), None, CPU, 1, 0)
    loader.start()
    assert len(list(loader.batches(INDICES, 0))) == len(INDICES)  # they have started
    for pid in children(os.getpid()):
        os.kill(pid, number)
    assert len(list(loader.batches(INDICES, 1))) == len(INDICES)
    loader.close()


class Exits(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        sys.exit(0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_calls_sys_exit_is_named(workers):
    loader = Streaming(Exits(), None, CPU, workers, 0)
    with pytest.raises(RuntimeError, match=r"sys.exit\(0\) was called in __getitem__, line \d+ of test_loaders.py"):
        list(loader.batches(INDICES, 0))
    loader.close()


class Where(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return len(os.sched_getaffinity(0))


def test_a_bound_workers_loaders_may_use_all_cores():
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(every)})
    try:
        for cores, expected in ((None, 1), (every, len(every))):
            (batch,) = Streaming(Where(), None, CPU, 1, 0, Feed(cores=cores)).batches([np.array([4, 2])], 0)
            assert batch.tolist() == [expected] * 2
    finally:
        os.sched_setaffinity(0, every)
