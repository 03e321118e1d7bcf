"""Subsets of the training data: nested, stratified, the same wherever they are chosen, and known to what follows a run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import paceline
from paceline import Arrays
from paceline.config import make_config
from paceline.core.stream import Stream
from paceline.errors import UsageError
from paceline.training.subset import choose_samples, labels_of, take_samples

CLASSES = {
    "balanced": [600] * 10,
    "one large": [5000] + [7] * 40,
    "all sizes": [1000, 1, 1, 1, 333, 12],
    "many small": [3] * 200,
    "one each": [1] * 20,
}


@pytest.mark.parametrize("sizes", CLASSES.values(), ids=CLASSES)
def test_every_subset_is_stratified_to_within_one_sample_and_part_of_the_next(sizes):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    total, before = len(labels), set()
    for count in sorted({int(each) for each in np.geomspace(1, total, 30)}):
        chosen = choose_samples(total, count, 3, labels)
        assert len(set(chosen)) == len(chosen) == count
        assert list(chosen) == sorted(chosen)
        assert before <= set(chosen)
        before = set(chosen)
        found = np.bincount(labels[chosen], minlength=len(sizes))
        assert np.abs(found - count * np.array(sizes) / total).max() < 1
    assert before == set(range(total))


def test_without_labels_subsets_are_nested_and_follow_from_the_seed():
    assert list(choose_samples(10, 10, 0)) == list(range(10))
    first, other = (set(choose_samples(1000, 100, seed)) for seed in (0, 1))
    assert first != other
    assert first == set(choose_samples(1000, 100, 0)) < set(choose_samples(1000, 101, 0))
    assert 300 < np.mean(list(first)) < 700


def test_labels_and_seed_decide_a_subset():
    labels = np.arange(12) % 3
    assert list(choose_samples(12, 6, 0, labels)) == [3, 4, 5, 9, 10, 11]  # pinned: a resumed run must find the same samples
    assert list(choose_samples(12, 6, 1, labels)) == [0, 1, 2, 6, 10, 11]
    assert list(choose_samples(6, 3, 0)) == [3, 4, 5]


@pytest.mark.parametrize(
    ("second", "known"),
    [
        (torch.arange(6), True),
        (torch.arange(6, dtype=torch.uint8), True),
        (torch.tensor([True] * 6), True),
        (torch.arange(6.0), False),
        (torch.zeros(6, 2, dtype=torch.long), False),
        (None, False),
    ],
)
def test_labels_are_one_whole_number_per_sample(second, known):
    data = Arrays((torch.zeros(6, 1),) if second is None else (torch.zeros(6, 1), second))
    assert (labels_of(data) is not None) == known
    taken = take_samples(data, make_config({"train_samples": 3, "subset": "random"}), "t")
    assert len(taken) == 3
    assert ("stratified by label" in taken.about) == known
    assert ("not stratified" in taken.about) != known


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("subset", ["first", "random"])
def test_a_dataset_has_subsets_too(subset):
    taken = take_samples(Numbers(), make_config({"train_samples": 5, "subset": subset}), "t")
    expected = [0, 1, 2, 3, 4] if subset == "first" else list(choose_samples(50, 5, 0))
    assert [taken[index] for index in range(5)] == expected
    assert taken.about.startswith("5 of 50 samples")


def test_mistakes_are_one_line():
    data = Arrays((torch.zeros(6, 1),))
    for options, words in (
        ({"subset": "random"}, "--subset random needs --train-samples"),
        ({"train_samples": 7}, "--train-samples is 7: task t has 6 training samples"),
    ):
        with pytest.raises(UsageError, match=words):
            take_samples(data, make_config(options), "t")
    with pytest.raises(UsageError, match=r"use Stream\(..., samples=N\)"):
        take_samples(Stream([lambda: iter(())], samples=9), make_config({"train_samples": 7}), "t")
    assert take_samples(data, make_config({}), "t") is data


TASK = """
from paceline import Arrays, Task, classify
import torch
from torch import nn

def task():
    x, y = torch.arange(40.0)[:, None], torch.arange(40) % 2
    return Task(name="t", model=lambda: nn.Linear(1, 2), train=Arrays((x, y)), validation=Arrays((x, y)),
                objective=classify(), predict=lambda model, batch: {"x": batch[0][:, 0]},
                defaults={"global_batch": 4, "base_lr": 1e-6, "epochs": 2})
"""


def test_a_run_and_what_follows_it_use_the_same_samples(runs: Path):
    Path("subset_task.py").write_text(TASK)
    options = {"train_samples": 10, "subset": "random", "seed": 7}
    paceline.train("subset_task.py", name="r", **options, max_steps=3)
    about = json.loads((runs / "r" / "environment.json").read_text())["contract"]
    assert about["train_samples"] == 10
    assert "10 of 40 samples, chosen by the seed, stratified by label" in about["data"]
    paceline.train("subset_task.py", resume="r", max_steps=6)
    with pytest.raises(UsageError, match="--subset"):
        paceline.train("subset_task.py", resume="r", subset="first", epochs=3)
    assert paceline.cli.run(["predict", "r", "--data", "train", "--to", "p.npz"]) == 0
    seen = np.load("p.npz")["x"]
    assert list(seen) == list(choose_samples(40, 10, 7, np.arange(40) % 2))
