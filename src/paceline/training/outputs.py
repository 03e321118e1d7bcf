"""Files of predictions, written row by row in sample order: .npy, .npz, .safetensors, .csv, .jsonl.

The size of an array file is known from the first chunk and the number of samples. So rows are written where they belong as they
arrive, and memory holds one chunk. The bytes depend only on the predictions: no times, no names of machines.
"""

import csv
import json
import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.errors import PacelineError, UsageError, reason
from paceline.files import finite, replacing
from paceline.training.checkpoint.file import CODES

SUFFIXES = (".npz", ".npy", ".safetensors", ".csv", ".jsonl")
WHOLE = "outputs"
"""The name of a prediction that is a single tensor."""

_MOST_COLUMNS = 1000
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first time that a zip file can hold


class Writer(Protocol):
    """Takes the predictions of one chunk after the other."""

    def add(self, first: int, rows: Mapping[str, Tensor]) -> None:
        """The rows of samples `first`, `first` + 1, ..., by name."""


def check_target(path: Path, force: bool) -> None:
    """Raise a UsageError if predictions cannot be written there."""
    if path.suffix not in SUFFIXES:
        found = f"has the suffix {path.suffix!r}" if path.suffix else "has no suffix"
        raise UsageError(f"--to {path} {found}: use {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if path.is_dir():
        raise UsageError(f"--to {path} is a folder: give the name of a file")
    if path.exists() and not force:
        raise UsageError(f"--to {path} exists: use --force to replace it, or another name")
    if not path.parent.is_dir():
        raise UsageError(f"--to {path}: the folder {path.parent} does not exist")


@contextmanager
def writing(path: Path, samples: int) -> Iterator[Writer]:
    """A writer of the format that the suffix names. The file appears when the block succeeds, complete."""
    try:
        with replacing(path) as temporary, ExitStack() as stack:
            match path.suffix:
                case ".csv" | ".jsonl":
                    file = stack.enter_context(temporary.open("w", encoding="utf-8", newline=""))
                    yield _Csv(file) if path.suffix == ".csv" else _JsonLines(file)
                case ".safetensors":
                    yield _Safetensors(stack.enter_context(temporary.open("wb")), samples)
                case ".npy":
                    yield _Npy(stack.enter_context(temporary.open("wb")), samples)
                case _:
                    folder = Path(stack.enter_context(TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")))
                    writer = _Npz(folder, samples, stack)
                    yield writer
                    writer.close(temporary)
    except OSError as error:
        raise PacelineError(f"cannot write {path}: {reason(error)}") from None


class _Shapes:
    """Checks that all chunks have the same names, types and shapes of rows: an array file cannot hold anything else."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}

    def check(self, rows: Mapping[str, Tensor]) -> bool:
        """Whether this is the first chunk."""
        found = {name: (value.dtype, tuple(value.shape[1:])) for name, value in rows.items()}
        if not self._first:
            self._first = found
            return True
        if found != self._first:
            name = next((name for name in found if found[name] != self._first.get(name)), next(iter(self._first)))
            was, now = (_words(each.get(name)) for each in (self._first, found))
            raise UsageError(
                f"predictions differ between samples: {name} is {was} in one batch, {now} in another; use --to X.jsonl"
            )
        return False


def _words(found: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "missing" if found is None else f"{str(found[0]).removeprefix('torch.')} of shape {found[1]} per sample"


class _Npy:
    """One array: numpy's header, then the rows."""

    def __init__(self, file: IO[bytes], samples: int) -> None:
        self._file, self._samples, self._shapes = file, samples, _Shapes()

    def add(self, first: int, rows: Mapping[str, Tensor]) -> None:
        if len(rows) != 1:
            raise UsageError(f"a .npy file holds one array, and each prediction has {', '.join(rows)}: use --to X.npz")
        self.append(next(iter(rows)), next(iter(rows.values())))

    def append(self, name: str, value: Tensor) -> None:
        is_first, array = self._shapes.check({name: value}), _to_numpy(value)
        if is_first:
            about = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False}
            np.lib.format.write_array_header_1_0(self._file, {**about, "shape": (self._samples, *array.shape[1:])})
        self._file.write(np.ascontiguousarray(array).data if array.size else b"")


class _Npz:
    """A zip file of arrays. Each has a file of its own until all rows are there."""

    def __init__(self, folder: Path, samples: int, stack: ExitStack) -> None:
        self._folder, self._samples, self._stack = folder, samples, stack
        self._files: dict[str, tuple[IO[bytes], _Npy]] = {}

    def add(self, first: int, rows: Mapping[str, Tensor]) -> None:
        if not self._files:
            for number, name in enumerate(rows):
                file = self._stack.enter_context((self._folder / f"{number}.npy").open("w+b"))
                self._files[name] = file, _Npy(file, self._samples)
        if rows.keys() != self._files.keys():
            raise UsageError(
                f"predictions differ between samples: {', '.join(self._files)} in one batch, {', '.join(rows)} in another"
            )
        for name, value in rows.items():
            self._files[name][1].append(name, value)

    def close(self, target: Path) -> None:
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
            for name, (file, _) in self._files.items():
                file.seek(0)
                with archive.open(zipfile.ZipInfo(f"{name}.npy", _EPOCH), "w", force_zip64=True) as inner:
                    while block := file.read(1 << 20):
                        inner.write(block)


class _Safetensors:
    """Named tensors: the header first, then each tensor at its place."""

    def __init__(self, file: IO[bytes], samples: int) -> None:
        self._file, self._samples, self._shapes = file, samples, _Shapes()
        self._places: dict[str, int] = {}

    def add(self, first: int, rows: Mapping[str, Tensor]) -> None:
        if self._shapes.check(rows):
            self._begin(rows)
        for name, value in rows.items():
            flat = value.contiguous().view(-1).view(torch.uint8)
            self._file.seek(self._places[name] + first * math.prod(value.shape[1:]) * value.dtype.itemsize)
            self._file.write(flat.numpy().data if flat.numel() else b"")

    def _begin(self, rows: Mapping[str, Tensor]) -> None:
        entries: dict[str, Any] = {}
        end, starts = 0, {}
        for name, value in sorted(rows.items(), key=lambda item: -item[1].dtype.itemsize):  # aligned, for readers that map it
            if value.dtype not in CODES:
                raise UsageError(f"{name} has dtype {value.dtype}, which .safetensors does not support: use --to X.npz")
            shape = [self._samples, *value.shape[1:]]
            starts[name], end = end, end + math.prod(shape) * value.dtype.itemsize
            entries[name] = {"dtype": CODES[value.dtype], "shape": shape, "data_offsets": [starts[name], end]}
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._places = {name: 8 + len(header) + start for name, start in starts.items()}


class _Csv:
    """A line per sample: its number, then one column per value."""

    def __init__(self, file: IO[str]) -> None:
        self._csv, self._shapes = csv.writer(file, lineterminator="\n"), _Shapes()

    def add(self, first: int, rows: Mapping[str, Tensor]) -> None:
        flat = {name: _to_numpy(value).reshape(len(value), -1) for name, value in rows.items()}
        if self._shapes.check(rows):
            columns = sum(array.shape[1] for array in flat.values())
            if columns > _MOST_COLUMNS:
                raise UsageError(f"a .csv file would need {columns:,} columns: use --to X.npz, or X.safetensors")
            names = [
                [name] if rows[name].dim() == 1 else [f"{name}_{i}" for i in range(array.shape[1])]
                for name, array in flat.items()
            ]
            self._csv.writerow(["sample", *(name for each in names for name in each)])
        for i, row in enumerate(zip(*flat.values(), strict=True), start=first):
            self._csv.writerow([i, *(str(value) for values in row for value in values)])


class _JsonLines:
    """A JSON object per line: the sample's number and its values, of any shape."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def add(self, first: int, rows: Mapping[str, Tensor]) -> None:
        values = {name: value.tolist() for name, value in rows.items()}
        for i in range(len(next(iter(rows.values())))):
            line = {"sample": first + i, **{name: each[i] for name, each in values.items()}}
            self._file.write(json.dumps(finite(line)) + "\n")


def _to_numpy(value: Tensor) -> np.ndarray:
    """numpy has no bfloat16: float32 holds the same values."""
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def name_rows(tree: Any, count: int) -> dict[str, Tensor]:
    """The tensors of a prediction by name. Raises a UsageError unless each has one row per sample."""
    named: dict[str, Tensor] = {}
    _name(tree, "", named)
    if not named:
        raise UsageError("a prediction holds no tensor: return a tensor, or a tuple or dict of tensors, one row per sample")
    for name, value in named.items():
        if value.dim() == 0 or len(value) != count:
            raise UsageError(
                f"a prediction has {name} of shape {tuple(value.shape)} for {count} samples: it must have one row per sample"
            )
    return named


def _name(tree: Any, name: str, named: dict[str, Tensor]) -> None:
    if isinstance(tree, Tensor):
        named[name or WHOLE] = tree.detach()
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            _name(value, f"{name}.{key}" if name else str(key), named)
    elif isinstance(tree, tuple | list):
        for i, value in enumerate(tree):
            _name(value, f"{name}.{i}" if name else f"{WHOLE}.{i}", named)
    elif tree is not None:
        raise UsageError(f"a prediction holds a {type(tree).__name__}: use tensors, or tuples, lists and dicts of tensors")
