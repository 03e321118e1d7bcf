"""Weights from a file, matched by name with those of a model: for `--init-from`, `paceline.load`, `evaluate` and `predict`.

A torch file is a pickle, and unpickling can run code. So torch files are read with `weights_only=True`, which allows only
tensors and plain containers.
"""

import hashlib
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config import Config
from paceline.dist.tensors import broadcast_tensors
from paceline.dist.world import World
from paceline.errors import PacelineError, RecordError, UsageError, first_line, reason
from paceline.records import find_record, read_result
from paceline.status import Status

MODEL = "model.safetensors"

_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_WRAPPERS = ("module.", "_orig_mod.")  # DDP and torch.compile put these before the names of weights
_NESTED = ("state_dict", "model_state_dict", "model_state", "model", "weights", "net")
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Match:
    """How the weights in a file fit a model: names of tensors."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """In the model, not in the file."""
    unexpected: tuple[str, ...]
    """In the file, not in the model."""
    reshaped: tuple[str, ...]
    """In both, with different shapes: name and shapes."""

    @property
    def complete(self) -> bool:
        """Whether everything in the file and everything in the model matched."""
        return not (self.missing or self.unexpected or self.reshaped)

    def describe(self) -> str:
        """In words: how many tensors were loaded, and which were not."""
        total = len(self.loaded) + len(self.missing) + len(self.reshaped)
        if self.complete:
            return f"all {total:,} tensors"
        parts = [f"{len(self.loaded):,} of {total:,} tensors"]
        for names, what in ((self.missing, "missing"), (self.unexpected, "unexpected"), (self.reshaped, "of another shape")):
            if names:
                parts.append(f"{len(names):,} {what} ({_first(names)})")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Initial:
    """The weights that a run starts from."""

    about: str = ""
    """For the contract; "" if the model's own random weights are used."""
    sha256: str = ""
    """Of the file."""
    read: bool = True
    """False: the run continues from a checkpoint, so the file is not needed."""


def start_from(model: nn.Module, config: Config, world: World, known: Initial | None = None) -> Initial:
    """Load the weights of `--init-from` into a model, the same on every worker. Collective: call on every rank.

    `known` says what a run that continues from a checkpoint started from; then nothing is read.
    """
    if known is not None:
        return known
    if not config.init_from:
        return Initial()
    weights, sha256 = read_on_main(lambda: _read(config.init_from, config.runs_dir), world)
    match = fit_weights(model, weights)
    if not match.loaded:
        raise UsageError(
            f"--init-from {config.init_from}: no tensor fits this model; the file has {_first(tuple(weights)) or 'none'}, the"
            f" model {_first(tuple(model.state_dict()))}" + (f"; {match.describe()}" if match.reshaped else "")
        )
    return Initial(about=f"{config.init_from} (sha256 {sha256[:16]}), {match.describe()}", sha256=sha256)


def _read(given: str, runs_dir: str) -> tuple[dict[str, Tensor], str]:
    try:
        path = find_weights(given, runs_dir)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return read_weights(path), sha256
    except OSError as error:
        raise UsageError(f"--init-from {given}: {reason(error)}") from None
    except PacelineError as error:
        raise UsageError(f"--init-from {given}: {error}") from None


def read_on_main(read: Any, world: World) -> tuple[dict[str, Tensor], str]:
    """Rank 0's (weights, text) on every worker; its PacelineError is raised on every worker as a UsageError.

    Collective: call on every rank.
    """
    weights: dict[str, Tensor] = {}
    text = problem = ""
    if world.is_main:
        try:
            weights, text = read()
        except PacelineError as error:
            problem = str(error)
    problem, text = world.broadcast([problem, text])
    if problem:
        raise UsageError(problem)
    return broadcast_tensors(weights, world), text


def find_weights(given: str, runs_dir: str, name: str = MODEL) -> Path:
    """The file that is meant: itself, or the weights of a record, given by its folder or name."""
    if Path(given).suffix in (".safetensors", *_TORCH) and not Path(given).exists():
        raise UsageError("there is no such file")
    path = Path(given) if given and Path(given).is_file() else find_record(given, runs_dir)
    if path.is_dir():
        if not (path / name).is_file():
            raise UsageError(_describe_lack(path, name))
        path = path / name
    return path


def _describe_lack(record: Path, name: str) -> str:
    if name != MODEL:
        return f"{record} has no {name}: train with --save-best to keep the weights of the best epoch"
    if not any((record / each).exists() for each in ("config.toml", "metrics.jsonl", "result.json")):
        return f"{record} is not a record: it has no {name}"
    with suppress(RecordError):
        if read_result(record).get("status") == Status.DIVERGED:
            return f"{record} has no {name}: its run diverged, so no weights were kept"
    return f"{record} has no {name}: the run is not finished; finish it with paceline train TASK --resume {record}"


def read_weights(path: Path) -> dict[str, Tensor]:
    """The named tensors in a .safetensors file or a torch file. Raises a UsageError of one line if there are none."""
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix not in _TORCH:
        raise UsageError(
            f"{path.name} has the suffix {path.suffix!r}: use .safetensors, or {', '.join(_TORCH)} for a torch file"
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UsageError(
            f"{path.name} holds more than weights: unpickling it could run code, so it is refused; save model.state_dict(), or"
            " a .safetensors file"
        ) from None
    except OSError:
        raise
    except Exception as error:  # a damaged file can raise almost anything
        raise UsageError(f"{path.name} is not a torch file, or is damaged: {first_line(error)}") from None
    return _find_tensors(found, path)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise UsageError(f"{path.name} is not a .safetensors file, or is damaged: {first_line(error)}") from None


def _find_tensors(found: Any, path: Path) -> dict[str, Tensor]:
    """The state dict in what a torch file held: itself, or under one of the usual names."""
    # The nested ones first: training scripts save other tensors beside them, such as the best accuracy.
    for each in (*(found.get(name) for name in _NESTED), found) if isinstance(found, Mapping) else ():
        if isinstance(each, Mapping):
            tensors = {str(name): value for name, value in each.items() if isinstance(value, Tensor)}
            if tensors:
                return tensors
    keys = f" with {_first(tuple(map(str, found)))}" if isinstance(found, Mapping) and found else ""
    raise UsageError(f"{path.name} holds {type(found).__name__}{keys}, no weights: save model.state_dict()")


@torch.no_grad()
def fit_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Match:
    """Copy the tensors that fit into the model's weights and buffers, in place."""
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    named = _own_names(weights, own)
    fits = {name: value for name, value in named.items() if name in own and _kind(own[name]) == _kind(value)}
    for name, value in fits.items():
        own[name].copy_(value)
    shared = {_place(own[name]) for name in fits if own[name].numel()}  # tied weights are stored once
    reshaped = [name for name in own if name in named and name not in fits]
    return Match(
        loaded=tuple(name for name in own if name in fits or (name not in named and _place(own[name]) in shared)),
        missing=tuple(name for name in own if name not in named and _place(own[name]) not in shared),
        unexpected=tuple(name for name in named if name not in own),
        reshaped=tuple(f"{name}: {_shape(named[name])} in the file, {_shape(own[name])} in the model" for name in reshaped),
    )


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    with suppress(RuntimeError):  # a tensor without storage
        return tensor.data_ptr(), tuple(tensor.shape)
    return id(tensor), tuple(tensor.shape)


def _own_names(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by the model's names. If none is known, a first part that all share is removed: Lightning saves a module's
    net as `model.conv.weight`, or whatever its attribute is called.
    """
    named = {_own_name(name, own): value for name, value in weights.items()}
    shared = {name.partition(".")[0] for name in named}
    if len(shared) == 1 and not any(name in own for name in named):
        inner = {name.partition(".")[2]: value for name, value in named.items()}
        return inner if any(name in own for name in inner) else named
    return named


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.layout, bool]:
    """What must be equal to copy one tensor to another."""
    return tensor.shape, tensor.layout, tensor.is_complex()


def _own_name(name: str, own: Mapping[str, Tensor]) -> str:
    """The name without what DDP and torch.compile put into it."""
    plain = name.replace("._orig_mod.", ".")
    while name not in own and plain not in own and plain.startswith(_WRAPPERS):
        plain = plain.partition(".")[2]
    return name if name in own else plain


def _shape(tensor: Tensor) -> str:
    kind = " complex" if tensor.is_complex() else "" if tensor.layout == torch.strided else " sparse"
    return (" x ".join(map(str, tensor.shape)) or "a scalar") + kind


def _first(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
