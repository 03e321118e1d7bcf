"""The part of the training data that a run with `--train-samples N` uses: the first N samples, or N chosen by the seed.

Chosen subsets are nested: with the same seed, a smaller one is part of every larger one. If the samples have labels, every
subset is stratified: of each label it has its share of N, to within one sample, whatever N is. To get both, each sample has a
window of places in one order of all samples: sample r of a label with n of the N samples comes no earlier than place r N/n and
before place (r + 1) N/n. Filling the places by the earliest deadline keeps every window (Baruah et al., Algorithmica 15, 1996).
A subset is the beginning of that order, sorted. It follows from the seed and the labels alone, so it is the same on any number
of workers.
"""

import heapq
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from paceline.config import Config
from paceline.core.hashes import key, keys_numpy
from paceline.core.stream import Stream
from paceline.data.loaders import Arrays
from paceline.errors import UsageError
from paceline.output import plural

_SUBSET = 0x5B5E7  # separates these random numbers from all others


def take_samples(data: Any, config: Config, task: str) -> Any:
    """The samples that `--train-samples` and `--subset` ask for; all of them by default."""
    count, chosen = config.train_samples, config.subset == "random"
    if not count:
        if chosen:
            raise UsageError("--subset random needs --train-samples: it says how many samples to choose; give both, or neither")
        return data
    if isinstance(data, Stream):
        raise UsageError("--train-samples needs data that can be indexed: use Stream(..., samples=N) instead")
    if count > len(data):
        raise UsageError(f"--train-samples is {count}: task {task} has {plural(len(data), 'training sample')}")
    if isinstance(data, Arrays) and not chosen:
        return data.first(count)
    labels = labels_of(data)
    samples = choose_samples(len(data), count, config.seed, labels) if chosen else np.arange(count)
    words = f"{count:,} of {plural(len(data), 'sample')}" + (", chosen by the seed" if chosen else "")
    if chosen:
        words += ", stratified by label" if labels is not None else ", not stratified: no whole-number labels known in advance"
    if isinstance(data, Arrays):
        rows = torch.from_numpy(samples)
        return Arrays(tuple(tensor[rows] for tensor in data.tensors), f"{data.about}; {words}" if data.about else words)
    part: Any = Subset(cast(Dataset[Any], data), samples.tolist())
    part.about = words  # for the contract
    return part


def labels_of(data: Any) -> np.ndarray | None:
    """The labels of Arrays whose second tensor has one whole number per sample; None for all other data."""
    if not isinstance(data, Arrays) or len(data.tensors) < 2:
        return None
    labels = data.tensors[1]
    whole = not (labels.is_floating_point() or labels.is_complex())
    return labels.cpu().numpy() if labels.dim() == 1 and whole else None


def choose_samples(total: int, count: int, seed: int, labels: np.ndarray | None = None) -> np.ndarray:
    """The numbers of `count` of `total` samples, in order: nested for one seed, stratified if there are labels."""
    shuffled = np.argsort(keys_numpy(key(seed, _SUBSET), np.arange(total)), kind="stable")
    return np.sort(shuffled[:count] if labels is None else shuffled[_stratify(labels[shuffled], count)])


def _stratify(labels: np.ndarray, count: int) -> np.ndarray:
    """The places of the first `count` samples in the stratified order of these shuffled labels."""
    by_label = np.argsort(labels, kind="stable")
    _, begins, sizes = np.unique(labels[by_label], return_index=True, return_counts=True)
    size = np.repeat(sizes, sizes)
    rank = np.arange(len(labels)) - np.repeat(begins, sizes)
    release, deadline = rank * len(labels) // size, -(-(rank + 1) * len(labels) // size)
    order = np.argsort(release, kind="stable")
    waiting = zip(release[order].tolist(), deadline[order].tolist(), by_label[order].tolist(), strict=True)
    upcoming, ready, chosen = next(waiting, None), list[tuple[int, int]](), list[int]()
    for place in range(count):
        while upcoming is not None and upcoming[0] <= place:
            heapq.heappush(ready, upcoming[1:])
            upcoming = next(waiting, None)
        chosen.append(heapq.heappop(ready)[1])
    return np.array(chosen, dtype=np.int64)
