"""Load a task's data, and check that all workers and all attempts of a run see the same data.

Arrays are compared by their bytes. A user's own Dataset is compared by its length and 18 of its items, each read twice. A field
of the items, such as the image in (image, label), is left out if it differs between two readings of any item: for a single
item, an image flipped by an unseeded generator looks the same in every second pair of readings.
"""

import dataclasses
import hashlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.config import Config
from paceline.core.keys import key, seed_sample
from paceline.core.stream import Stream, StreamReader
from paceline.data.conversion import name_type
from paceline.data.loaders import Arrays
from paceline.dist.agree import check_agreement, fingerprints
from paceline.dist.process import die_with_parent
from paceline.dist.world import World
from paceline.errors import UsageError, WorkersDisagree
from paceline.training.subset import take_samples
from paceline.training.task import Task, validation_sources
from paceline.training.task_fields import Data, check_data, check_length, is_factory

_TRAIN = "train"
_DATA = 0xDA7A  # separates the random numbers that make data from those of step 0
_SAME_DATA = (
    "the task must make the same data in every worker: make random data in a function, train=lambda: ..., which is seeded, or"
    " seed it yourself"
)
_CAUSES = (
    "the task must make the same data in every worker: pass generator=torch.Generator().manual_seed(0) to random_split, and"
    " sort labels that come from a set"
)
_Hashes = dict[str, str | None]
_ITEMS = 16  # to compare in a Dataset, besides the first and the last
_FIRST = 2  # to compare in a Stream
_FIRST_FORK_S = 30  # much longer than reading a few items takes
_BLOCK = 512  # words of 8 bytes compared together: a page of memory, so that a mapped file is not read as a whole
_ALL_BLOCKS = 1 << 15  # arrays up to this size are compared as a whole: 128 MiB take 50 ms, all of Fashion-MNIST 17 ms
_SOME_BLOCKS = 1 << 12  # of larger ones: 16 MiB


def load_data(task: Task, config: Config, world: World) -> tuple[Data, dict[str, Data], str]:
    """Load the training data, and the validation data by name, and hash them. The first worker of a node goes first: it may
    have to download for the others.

    Raises WorkersDisagree if workers see different data. Collective: call on every rank.
    """
    if world.local_rank == 0:
        made = _make(task, config)
    world.barrier()
    if world.local_rank != 0:
        made = _make(task, config)
    # Checked only now, so that all workers have the same error: a worker still at the barrier would only lose contact.
    checked = {field: _check(task, field, data) for field, data in made.items()}
    train, digest = checked[_TRAIN], hashlib.sha256()
    for field, data in checked.items():
        which, facts = _which(field), _facts(data)
        check_agreement(facts, world, f"about the {which} data", _SAME_DATA)
        digest.update(fingerprints(facts.values()).numpy().tobytes())
        if not isinstance(data, Arrays):
            digest.update(repr(_agree_on_items(data, which, config, world)).encode())
    train = take_samples(train, config, task.name)
    for field, data in {**checked, _TRAIN: train}.items():
        if not count_samples(data):
            raise UsageError(
                f"task {task.name}: its {_which(field)} data is empty, {name_type(data)} of 0 samples: check for a wrong"
                " folder, or a filter that removes everything"
            )
    names = list(validation_sources(task))
    return train, {name: checked[_field(task, name)] for name in names}, digest.hexdigest()


def count_samples(data: Data) -> int:
    """The number of samples."""
    return len(cast(Any, data))


def make_training(task: Task, config: Config) -> Data:
    """All training data of a task, as its runs get it, in this process alone."""
    return _check(task, _TRAIN, _make(dataclasses.replace(task, validation=None), config)[_TRAIN])


def _make(task: Task, config: Config) -> dict[str, Any]:
    """Make all data sets, by field, seeded: data made at random is the same on every worker."""
    sources = {_TRAIN: task.train, **{_field(task, name): source for name, source in validation_sources(task).items()}}
    made = {}
    for number, (field, source) in enumerate(sources.items()):
        seed_sample(key(config.seed, _DATA, number))
        made[field] = cast(Callable[[], Any], source)() if is_factory(source) else source
    return made


def _field(task: Task, name: str) -> str:
    """What to call a validation set in messages."""
    return f"validation set {name!r}" if isinstance(task.validation, Mapping) else "validation"


def _which(field: str) -> str:
    return "training" if field == _TRAIN else field


def _check(task: Task, field: str, made: Any) -> Data:
    """Data that can be loaded."""
    data = check_data(task.name, field, made)
    check_length(task.name, field, data)
    return data


def _facts(data: Data) -> dict[str, Tensor]:
    """What must be equal on all workers: the number of samples and the content of arrays."""
    facts = {"samples": torch.tensor(count_samples(data))}
    for i, tensor in enumerate(data.tensors if isinstance(data, Arrays) else ()):
        words, rest = _words(tensor)
        facts[f"the shape of array {i}"] = torch.tensor([*tensor.shape, *str(tensor.dtype).encode()])
        facts[f"array {i}"] = words if len(words) <= _ALL_BLOCKS else words[:: -(-len(words) // _SOME_BLOCKS)]
        facts[f"the end of array {i}"] = rest
    return facts


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor's bytes as blocks of int64, which are an eighth of the work, and the remaining bytes."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    if flat.storage_offset() % 8:  # torch can view only aligned bytes as int64
        flat = flat.clone()
    whole = flat.numel() // (8 * _BLOCK) * (8 * _BLOCK)
    return flat[:whole].view(torch.int64).view(-1, _BLOCK), flat[whole:]


def _agree_on_items(data: Stream | Dataset[Any], which: str, config: Config, world: World) -> list[_Hashes]:
    """Hashes of some items, without the fields that are not reproducible. Collective: call on every rank."""
    samples = _choose_items(count_samples(data), config.seed)
    if isinstance(data, Stream):  # only its first samples can be read at once
        samples = list(range(min(_FIRST, len(data))))
    read = partial(_hash_items, StreamReader(data, 1, config.seed) if isinstance(data, Stream) else data, samples, config.seed)
    hashes = in_child(read) if config.loader_workers else None
    # A Dataset that failed in the child is read here, so that its own error shows.
    rows = world.gather(read() if hashes is None else hashes)
    found = world.broadcast(_compare(rows) if rows else None)
    if found["differs"] is not None:
        item, rank = found["differs"]
        raise WorkersDisagree(
            f"workers see different {which} data: item {samples[item]} of {count_samples(data):,} on worker {rank} differs from"
            f" that on worker 0; {_CAUSES}"
        )
    return list(found["hashes"])


def in_child(function: Callable[[], Any]) -> Any:
    """Call the function, which returns JSON, in a fork of this process; None if it failed there.

    A Dataset that opens its file on first use must not open it in this process: the loader processes, which are also forks,
    would share the position in that file.

    Once in thousands of times a fork hangs, on a lock that another thread held at that moment. So the first fork gets a time
    limit and the second does not: slow data takes longer, but loads.
    """
    answer = _ask_child(function, _FIRST_FORK_S)
    if answer is None:
        answer = _ask_child(function, None)
    return json.loads(answer) if answer else None


def _ask_child(function: Callable[[], Any], limit_s: float | None) -> bytes | None:
    """What the function returned in a fork, as JSON; empty if it failed, None if it took too long and was killed."""
    reader, writer = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        with suppress(BaseException):
            die_with_parent(parent)
            os.close(reader)
            with os.fdopen(writer, "w") as file:
                file.write(json.dumps(function()))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = file.read() if wait([reader], limit_s) else None  # the child writes when it is done
    if answer is None:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answer


def _choose_items(count: int, seed: int) -> list[int]:
    """The first item, the last and a few in between."""
    return sorted({0, count - 1, *(key(seed, _DATA, 2, n) % count for n in range(_ITEMS))}) if count else []


def _hash_items(data: Dataset[Any], samples: list[int], seed: int) -> list[_Hashes]:
    """Hash each item's fields; None if two readings differ. Both readings draw the same random numbers."""
    readings: list[list[_Hashes]] = []
    for _ in range(2):
        readings.append([])
        for sample in samples:
            seed_sample(key(seed, _DATA, sample))
            readings[-1].append({name: hash_content(value) for name, value in _fields(data[sample]).items()})
    return [_same(first, second) for first, second in zip(*readings, strict=True)]


def _same(first: _Hashes, second: _Hashes) -> _Hashes:
    return {name: first.get(name) if first.get(name) == second.get(name) else None for name in first | second}


def _fields(item: Any) -> dict[str, Any]:
    """The fields of an item, by name: the elements of a tuple, the values of a dict, or else the whole item."""
    if isinstance(item, Mapping):
        return {str(name): value for name, value in sorted(item.items(), key=lambda pair: str(pair[0]))}
    return {str(i): value for i, value in enumerate(item)} if isinstance(item, tuple | list) else {"": item}


def _compare(rows: list[list[_Hashes]]) -> dict[str, Any]:
    """The hashes of the fields that are reproducible on all workers; and the first item that differs, with the worker."""
    unstable = {name for row in rows for item in row for name, value in item.items() if value is None}
    stable = [[{name: value for name, value in item.items() if name not in unstable} for item in row] for row in rows]
    pairs = ((item, rank) for item in range(len(stable[0])) for rank in range(len(stable)))
    return {
        "differs": next(([item, rank] for item, rank in pairs if stable[rank][item] != stable[0][item]), None),
        "hashes": stable[0],
    }


def hash_content(item: Any) -> str | None:
    """A 64-bit hash, in hex, of the numbers and texts in a sample of any type. None if it cannot be hashed."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        _feed(digest, item)
    except Exception:  # an unusual tensor or array: a check must not end a run that would have worked
        return None
    return digest.hexdigest()


class _Digest(Protocol):
    def update(self, data: Any, /) -> None: ...


def _feed(digest: _Digest, item: Any) -> None:
    """Hash each value with its type and size, so that different samples stay different. Skip objects of unknown types."""
    if isinstance(item, Tensor):
        if item.layout == torch.strided:
            digest.update(f"tensor {item.dtype} {tuple(item.shape)} ".encode())
            plain = item.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
            digest.update(plain.view(torch.uint8).numpy())
    elif isinstance(item, np.ndarray | np.generic) and not item.dtype.hasobject:
        digest.update(f"array {item.dtype.str} {item.shape} ".encode() + item.tobytes())
    elif isinstance(item, np.ndarray) and item.dtype == object:
        _feed(digest, item.tolist())
    elif item is None or isinstance(item, bool | int | float | complex | str | bytes):
        text = repr(item).encode()
        digest.update(f"{type(item).__name__} {len(text)} ".encode() + text)
    elif isinstance(item, Mapping):
        _feed_all(digest, "mapping", sorted(item.items(), key=lambda pair: str(pair[0])))
    elif isinstance(item, AbstractSet):
        _feed_all(digest, "set", sorted(map(str, map(hash_content, item))))
    elif isinstance(item, tuple | list):
        _feed_all(digest, "list", item)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        _feed_all(digest, "fields", [(each.name, getattr(item, each.name)) for each in dataclasses.fields(item)])
    elif callable(getattr(item, "tobytes", None)):  # a PIL image, an array.array
        about = [str(getattr(item, name, "")) for name in ("mode", "size", "typecode")]
        _feed_all(digest, type(item).__name__, [*about, item.tobytes()])


def _feed_all(digest: _Digest, kind: str, values: Any) -> None:
    digest.update(f"{kind} of {len(values)} ".encode())
    for value in values:
        _feed(digest, value)
