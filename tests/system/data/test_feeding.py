"""Other ways to feed a run: own collate, weighted draws and streams. In exact mode: one hash on 1, 2 and 3 workers, and after a
run was interrupted and resumed on another number of workers.
"""

import json
import random
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from harness.processes import paceline, run_workers
from harness.training import Watcher, train_in
from paceline.config import make_config
from paceline.core.stream import Stream
from paceline.data.tar import tar_stream
from paceline.dist.world import World
from paceline.records import read_result
from paceline.training.build import build
from paceline.training.loop import fit
from paceline.training.sampling import Weighted, balanced
from paceline.training.task import Task

SAMPLES = 60
OPTIONS = {"reduce": "exact", "virtual_workers": 3, "global_batch": 12, "epochs": 2, "base_lr": 0.05, "eval_batch": 8}


def row(number: int) -> Tensor:
    """Five inputs and a target, with noise drawn now."""
    return torch.sin(torch.arange(6.0) * (number + 1)) + 0.1 * torch.rand(6) + random.random()


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> Tensor:
        return row(sample)


class Words(Rows):
    """Rows of different lengths."""

    def __getitem__(self, sample: int) -> Tensor:
        return row(sample).repeat(1 + sample % 4)


class Endless(IterableDataset[Any]):
    """Cannot be split, and has an order of its own."""

    def __iter__(self) -> Iterator[Tensor]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        return map(row, order)


def pad(samples: list[Tensor]) -> dict[str, Tensor]:
    """Pad to the longest, and drop some values at random, as a language model's collator does."""
    padded = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"rows": padded * (torch.rand(padded.shape) > 0.1), "lengths": torch.tensor([len(each) for each in samples])}


def lengths(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    rows, count = batch["rows"], batch["lengths"]
    return {"loss": (model(rows[:, :5]).squeeze(1) - rows.sum(1) / count).square()}


def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    rows = batch["row"] if isinstance(batch, dict) else batch[0] if isinstance(batch, tuple) else batch
    return {"loss": (model(rows[:, :5].float()).squeeze(1) - rows[:, 5].float()).square()}


def of_shard(shard: int, shards: int, epoch: int) -> Iterator[Tensor]:
    return map(row, range(shard, SAMPLES, shards))


def write_tars(folder: Path, sizes: list[int]) -> list[Path]:
    """Tar files as webdataset writes them."""
    paths, numbers = [], iter(range(SAMPLES))
    for file, size in enumerate(sizes):
        paths.append(folder / f"shard-{file}.tar")
        with tarfile.open(paths[-1], "w") as tar:
            for number in [next(numbers) for _ in range(size)]:
                content = BytesIO()
                np.save(content, np.sin(np.arange(6.0) * (number + 1)))
                for ending, data in (("npy", content.getvalue()), ("json", json.dumps({"number": number}).encode())):
                    member = tarfile.TarInfo(f"{number:05d}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, BytesIO(data))
    return paths


def hugging_face() -> Any:
    import datasets

    values = torch.sin(torch.arange(6.0) * torch.arange(1, SAMPLES + 1).unsqueeze(1))
    return datasets.Dataset.from_dict({"row": values.tolist()})


def webdataset(paths: list[Path]) -> Any:
    import webdataset as wds

    def read(shard: int, shards: int, epoch: int) -> Any:
        urls = [str(path) for path in paths]
        random.shuffle(urls)  # the same order in all shards
        return wds.DataPipeline(
            wds.SimpleShardList(urls[shard::shards]), wds.tarfile_to_samples(), wds.decode(), wds.to_tuple("npy")
        )

    return Stream(read, SAMPLES, shuffle=5)


def make_tasks(folder: Path) -> dict[str, Task]:
    """A task for each way of feeding."""
    task = Task(
        name="fed", model=lambda: nn.Linear(5, 1), train=Rows(), validation=Rows(), objective=objective, defaults=OPTIONS
    )
    words = replace(task, train=Words(), validation=Words(), collate=pad, objective=lengths)
    weights = [1.0 + number % 5 for number in range(SAMPLES)]
    even, uneven = folder / "even", folder / "uneven"
    own, odd = sorted(even.iterdir()), sorted(uneven.iterdir())

    def decode(fields: dict[str, Any]) -> Any:
        return fields["npy"] + 0.1 * np.random.rand(6)

    return {
        "map": task,
        "collate": words,
        "collate and weights": replace(words, sampling=weights),
        "weights": replace(task, sampling=lambda data: Weighted(weights[: len(data)], draws=50)),
        "balanced": replace(task, sampling=balanced(["few" if number < 5 else "many" for number in range(SAMPLES)])),
        "stream": replace(task, train=Stream(of_shard, SAMPLES, shuffle=7), validation=Stream(of_shard, 31)),
        "not split": replace(task, train=Stream(Endless(), SAMPLES)),
        "a longer stream": replace(task, train=Stream(Endless(), SAMPLES - 7)),
        "tar": replace(task, train=tar_stream(own, decode), validation=tar_stream(odd, decode)),
        "uneven tar": replace(task, train=tar_stream(odd, decode, shuffle=3)),
    }


def make_library_tasks(folder: Path) -> dict[str, Task]:
    """The same with data of other libraries. Three parts divide six shards, but not four."""
    task, paths = make_tasks(folder)["map"], sorted((folder / "even").iterdir())
    table = hugging_face()
    streams = {shards: table.to_iterable_dataset(num_shards=shards).with_format("torch").shuffle(seed=1) for shards in (4, 6)}
    return {
        "Hugging Face": replace(task, train=table.with_format("torch")),
        "Hugging Face stream": replace(task, train=Stream(streams[6], SAMPLES), validation=Stream(streams[4], SAMPLES)),
        "not split": replace(task, train=Stream(streams[4], SAMPLES)),
        "webdataset": replace(task, train=webdataset(paths)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tars")
    for name, sizes in (("even", [10] * 6), ("uneven", [20, 3, 17, 9, 11])):
        (made / name).mkdir()
        write_tars(made / name, sizes)
    return made


class Broken(Exception):
    """Ends a run in the middle."""


def train_all(
    world: World, folder: Path, loader_workers: int, make: Callable[[Path], dict[str, Task]] = make_tasks
) -> dict[str, tuple[str, float]]:
    found = {}
    for name, task in make(folder).items():
        config = make_config(cast(dict[str, Any], task.defaults), {"loader_workers": loader_workers})
        with build(task, config, world) as run:  # which ends its loader processes
            result = fit(run, [Watcher()])
        found[name] = (result.model_sha256, result.metrics["loss"])
    return found


def break_off(world: World, folder: Path, into: Path) -> None:
    """Train each task to the middle of its second epoch, and end in an error."""
    for name, task in make_tasks(folder).items():
        calls = 0

        def fail(model: nn.Module, batch: Any, task: Task = task) -> dict[str, Tensor]:
            nonlocal calls
            calls += model.training
            if calls > 23:  # three passes per step
                raise Broken
            return task.objective(model, batch)

        options = {"loader_workers": 0, "checkpoint_every": "2"}
        with pytest.raises(Broken):
            train_in(world, replace(task, objective=fail), options, into / name)


def go_on(world: World, folder: Path, into: Path) -> dict[str, tuple[str, float]]:
    found = {}
    for name, task in make_tasks(folder).items():
        result = train_in(world, task, {"loader_workers": 0}, into / name, resumes=True).result
        found[name] = (result.model_sha256, result.metrics["loss"])
    return found


def test_one_hash_on_any_number_of_workers_and_after_a_break(folder: Path, tmp_path: Path) -> None:
    (alone,) = run_workers(train_all, 1, folder, 0)
    assert len({sha for sha, _ in alone.values()}) == len(alone), "two tasks trained on the same samples"
    for workers in (2, 3):
        for found in run_workers(train_all, workers, folder, 0):
            assert found == alone
    run_workers(break_off, 1, folder, tmp_path)
    for found in run_workers(go_on, 2, folder, tmp_path):
        assert found == alone


def test_shards_are_dealt_to_loader_processes(folder: Path) -> None:
    """On one worker with three parts, two processes read three shards; on two workers, one process reads two of them."""
    (alone,) = run_workers(train_all, 1, folder, 0, make_few)
    assert run_workers(train_all, 1, folder, 2, make_few) == [alone]
    assert run_workers(train_all, 2, folder, 1, make_few) == [alone, alone]


def make_few(folder: Path) -> dict[str, Task]:
    return {name: task for name, task in make_tasks(folder).items() if name in ("collate and weights", "stream", "not split")}


def test_data_of_hugging_face_and_webdataset(folder: Path) -> None:
    pytest.importorskip("datasets", reason="needs pip install datasets")
    pytest.importorskip("webdataset", reason="needs pip install webdataset")
    (alone,) = run_workers(train_all, 1, folder, 0, make_library_tasks, method="fork")
    for workers in (2, 3):
        for found in run_workers(train_all, workers, folder, workers - 2, make_library_tasks, method="fork"):
            assert found == alone


TASK = """
import os, signal, torch
from paceline import Stream, Task

def read(shard, shards, epoch):
    for number in range(shard, 48, shards):
        open("read.txt", "a").write(f"{epoch} {number}\\n")
        yield torch.sin(torch.arange(6.0) * (number + 1)) + torch.rand(6)

def objective(model, batch):
    if os.environ.get("KILL") and model.training:
        open("passes", "a").write("x")
        if os.path.getsize("passes") == 26:
            os.kill(os.getpid(), signal.SIGKILL)
    return {"loss": (model(batch[:, :5]).squeeze(1) - batch[:, 5]).square()}

def task():
    return Task(name="s", model=lambda: torch.nn.Linear(5, 1), train=Stream(read, samples=48), objective=objective,
                defaults={"reduce": "exact", "virtual_workers": 4, "global_batch": 8, "epochs": 2, "loader_workers": 1})
"""


def test_a_killed_stream_goes_on_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(TASK)
    calm = paceline("train", "task.py", "--name", "calm")
    assert calm.returncode == 0, calm.stderr
    assert "a stream of 48 samples: 4 shards, one per part" in calm.stdout
    lines = [line.split() for line in Path("read.txt").read_text().splitlines()]
    for epoch in "01":
        read = sorted(int(number) for at, number in lines if at == epoch)
        assert set(read) == set(range(48))
        assert epoch == "0" or len(read) == 48, "a sample was read twice"
    killed = paceline("train", "task.py", "--name", "x", "--checkpoint-every", "2", env={"KILL": "1"})
    assert killed.returncode == -9
    done = paceline("train", "task.py", "--resume", "x", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert read_result(Path("runs/x"))["model_sha256"] == read_result(Path("runs/calm"))["model_sha256"]
