"""Send a Task object to workers: pickled, in a file of the folder that the launcher makes for them.

The classes and functions of a notebook or an interactive session are in no file that a worker could import. cloudpickle writes
them by value. Unpickling runs code, so a worker reads only the file that its own launcher has just written (`_open_own`).
Records and checkpoints contain no pickles.
"""

import functools
import importlib
import io
import multiprocessing
import os
import pickle
import stat
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import FunctionType
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from paceline.cells import add_cells, find_cells
from paceline.dist.messages import launcher_folder
from paceline.errors import PacelineError, UsageError, reason
from paceline.explanation import headline
from paceline.training.task import Task
from paceline.training.tasks import make_importable

_FILE = "task.pickle"


def spell(task: Task) -> str:
    """The task in the command of a worker: `<my-task>`, which is no name, file or module that a user could give."""
    return f"<{task.name}>"


def send(task: Task, folder: Path) -> None:
    """Write the task into the folder of the launcher. Raises a UsageError that names the field that cannot be pickled."""
    make = _pickler_class(task.name)
    path = folder / _FILE
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            pickle.dump((sys.path, _read_settings()), file)  # first: loading the task may have to import modules
            pickler = make(file)
            pickler.dump(task)
            pickle.dump(find_cells(pickler.files), file)
    except OSError as error:
        raise PacelineError(
            f"task {task.name} cannot be written to {folder}: {reason(error)}; set TMPDIR to a folder with more room"
        ) from error
    except Exception as error:
        raise _refuse(task, error, make) from error


def receive(given: str | Task) -> str | Task:
    """The task that the launcher of this worker sent, if `given` is the spelling of one; otherwise `given`."""
    folder = launcher_folder()
    if folder is None or not isinstance(given, str) or not given.startswith("<"):
        return given
    with _open_own(folder.parent / _FILE) as file:
        path, settings = pickle.load(file)
        for entry in path:
            make_importable(entry or os.getcwd())
        _set_settings(settings)
        try:
            task = pickle.load(file)
        except Exception as error:
            raise UsageError(
                f"task {given[1:-1]} cannot be loaded in a worker: {headline(error)}; what it uses must be in the notebook"
                " itself, or in modules that a new process can import"
            ) from error
        add_cells(pickle.load(file))
    # Loader processes, too, must find the classes of a notebook. Forks do; Python 3.14's default would pickle their names.
    if "fork" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("fork", force=True)
    return cast(Task, task)


def _open_own(path: Path) -> BinaryIO:
    """Open a file of the launcher. Refuse one that anyone else could have written, or a link."""
    try:
        file = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")  # noqa: SIM115  # the caller closes it
    except OSError as error:
        raise PacelineError(f"the task that the launcher sent cannot be read: {path}: {reason(error)}") from error
    for found in (os.fstat(file.fileno()), os.lstat(path.parent)):
        private = stat.S_IMODE(found.st_mode) & 0o077 == 0
        if found.st_uid != os.geteuid() or not private:
            file.close()
            raise PacelineError(f"{path} is not private to this user: it is not the launcher's own file, so it is not loaded")
    return file


_Settings = tuple[torch.dtype, str]


def _read_settings() -> _Settings:
    """What a notebook may have set in torch that changes a model's numbers: workers need the same."""
    return torch.get_default_dtype(), torch.get_float32_matmul_precision()


def _set_settings(settings: _Settings) -> None:
    torch.set_default_dtype(settings[0])
    torch.set_float32_matmul_precision(settings[1])


def _pickler_class(name: str) -> Any:
    try:
        cloudpickle: Any = importlib.import_module("cloudpickle")
    except ImportError:
        raise UsageError(
            f"task {name} is a Task object, and cloudpickle, which sends it to several workers, is not installed: pip install"
            " 'paceline[notebook]', or give the task's file"
        ) from None

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """cloudpickle's, which also notes the files of functions, and refuses what would not work in another process."""

        def __init__(self, file: Any) -> None:
            super().__init__(file)
            self.files: set[str] = set()

        def reducer_override(self, given: Any) -> Any:
            if isinstance(given, FunctionType):
                self.files.add(given.__code__.co_filename)
            elif isinstance(given, functools._lru_cache_wrapper):  # pickle would only write its name
                return _cache_again, (given.__wrapped__, given.cache_parameters())
            elif isinstance(given, Tensor) and given.device.type not in ("cpu", "meta"):  # all workers would use that GPU
                raise _CannotSend(f"it holds a tensor on {given.device}; move it to the CPU with .cpu()")
            elif isinstance(given, io.IOBase) and not isinstance(given, io.StringIO | io.BytesIO):
                for stream in ("stdout", "stderr"):
                    if given is getattr(sys, stream):
                        return getattr, (sys, stream)
                raise _CannotSend(f"it holds an open file; {_INSIDE}")  # cloudpickle would send the contents of some files
            return super().reducer_override(given)

    return Pickler


_INSIDE = "create it inside a function that each worker calls, or train with one worker"


class _CannotSend(TypeError):
    """An object that must not be pickled, although it could be."""


def _cache_again(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _refuse(task: Task, error: Exception, make: Any) -> UsageError:
    """The error for a task that cannot be pickled: which field, and why."""
    name, error = next(_find_culprits(task, make), ("it", error))
    why = str(error) if isinstance(error, _CannotSend) else f"{headline(error)}; {_INSIDE}"
    return UsageError(f"task {task.name}: {name} cannot be sent to the workers: {why}")


def _find_culprits(task: Task, make: Any) -> Iterator[tuple[str, Exception]]:
    """The fields that cannot be pickled, each with its error."""
    for field in fields(task):
        try:
            make(_Nowhere()).dump(getattr(task, field.name))
        except Exception as error:
            yield field.name, error


class _Nowhere(io.RawIOBase):
    """A file that drops what is written to it."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes
