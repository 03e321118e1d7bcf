"""A Task object on its way to workers: what arrives, and what cannot be sent."""

import functools
import io
import linecache
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from harness.training import blobs
from paceline import cells
from paceline.dist.place import MESSAGES_VARIABLE
from paceline.errors import PacelineError, UsageError
from paceline.explanation import find_user_frame
from paceline.training import pickled_task
from paceline.training.task import Task

CELL = "/tmp/ipykernel_4711/1234.py"  # no such file, as in a kernel
SOURCE = """import functools
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(scale.numel(), 1)

scale = torch.ones(3)

@functools.cache
def read():
    return scale * 2

def fail(model, batch):
    raise ValueError("here")
"""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a launcher, as its workers see it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "1").mkdir()
        monkeypatch.setenv(MESSAGES_VARIABLE, f"{folder}/1")
        yield Path(folder)


@pytest.fixture(autouse=True)
def start_method() -> Iterator[None]:
    """A worker changes it for its whole life, a test only for its own."""
    before = multiprocessing.get_start_method()
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a cell of a notebook has defined."""
    monkeypatch.setitem(linecache.cache, CELL, (len(SOURCE), None, SOURCE.splitlines(keepends=True), CELL))
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SOURCE, CELL, "exec"), found)
    for name in ("Net", "read", "fail"):
        monkeypatch.setattr(sys.modules["__main__"], name, found[name], raising=False)
    return found


def arrive(task: Task, folder: Path) -> Task:
    pickled_task.send(task, folder)
    received = pickled_task.receive(pickled_task.spell(task))
    assert isinstance(received, Task)
    return received


def test_what_a_cell_defines_arrives(launched: Path, cell: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    read = cell["read"]
    task = replace(blobs(), model=cell["Net"], prepare=lambda batch, samples, epoch: read(), objective=cell["fail"])
    pickled_task.send(task, launched)
    for name in ("Net", "read", "fail"):
        monkeypatch.delattr(sys.modules["__main__"], name)  # a worker has none of them
    monkeypatch.delitem(linecache.cache, CELL)
    monkeypatch.setattr(cells, "_known", {})
    received = pickled_task.receive("<blobs>")
    assert isinstance(received, Task)
    assert received.model is not None
    assert received.model().layer.in_features == 3
    assert received.prepare is not None
    assert received.prepare((), torch.zeros(0), 0).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="here") as raised:
        received.objective(nn.Linear(1, 1), ())
    assert find_user_frame(raised.value) == f'{CELL}, line 17, in fail\n    raise ValueError("here")'


def test_the_file_is_private_and_has_its_own_name(launched: Path) -> None:
    pickled_task.send(blobs(), launched)
    (file,) = (path for path in launched.iterdir() if path.is_file())
    assert file.stat().st_mode & 0o777 == 0o600
    assert pickled_task.receive("my_task.py") == "my_task.py"


def test_a_task_is_only_loaded_from_the_launchers_own_file(launched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = launched / "task.pickle"
    pickled_task.send(blobs(), launched)
    for path, mode in ((file, 0o644), (launched, 0o755)):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(PacelineError, match="not private to this user"):
            pickled_task.receive("<blobs>")
        path.chmod(before)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(PacelineError, match="not private to this user"):
            pickled_task.receive("<blobs>")
    file.rename(launched / "other")
    file.symlink_to("other")
    with pytest.raises(PacelineError, match=r"cannot be read: .*task.pickle"):
        pickled_task.receive("<blobs>")
    monkeypatch.delenv(MESSAGES_VARIABLE)  # a command line that no launcher started
    assert pickled_task.receive("<blobs>") == "<blobs>"


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda:0")  # type: ignore[assignment]


class Locked(Dataset[Any]):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return (torch.zeros(1),)


OPEN = open(os.devnull)  # noqa: SIM115  # text that is read: cloudpickle would send its contents


def _holding(thing: Any) -> Callable[[Any, Any], Any]:
    return lambda model, batch: thing


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"train": Locked()}, "train cannot be sent to the workers: TypeError: cannot pickle '_thread.lock' object; create"),
        ({"objective": _holding(n for n in (1, 2))}, "objective cannot be sent to the workers: TypeError: cannot pickle 'gen"),
        ({"objective": _holding(OPEN)}, "objective cannot be sent to the workers: it holds an open file; create it"),
        ({"prepare": _holding(OnGpu([1.0]))}, "prepare cannot be sent to the workers: it holds a tensor on cuda:0; move it"),
        ({"validation": _holding(threading.local())}, "validation cannot be sent to the workers"),
    ],
)
def test_what_cannot_be_sent_is_named(launched: Path, fields: dict[str, Any], said: str) -> None:
    task = blobs()
    for name, value in fields.items():
        object.__setattr__(task, name, value)  # past the checks of a Task's fields
    with pytest.raises(UsageError, match=f"^task blobs: {said}") as raised:
        pickled_task.send(task, launched)
    assert "\n" not in str(raised.value)


def test_streams_and_buffers_can_be_sent(launched: Path) -> None:
    arrived = arrive(replace(blobs(), prepare=functools.partial(print, io.StringIO("text"), file=sys.stdout)), launched)
    assert arrived.prepare.keywords["file"] is sys.stdout  # type: ignore[union-attr]


def test_a_module_that_is_not_found(launched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("def objective(model, batch): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    from beside import objective  # type: ignore[import-not-found]

    pickled_task.send(replace(blobs(), objective=objective), launched)
    monkeypatch.delitem(sys.modules, "beside")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    received = pickled_task.receive("<blobs>")  # the path of the program is sent too
    assert isinstance(received, Task)
    monkeypatch.delitem(sys.modules, "beside")
    (tmp_path / "beside.py").unlink()
    with pytest.raises(UsageError, match=r"task blobs cannot be loaded in a worker: ModuleNotFoundError: .*'beside'"):
        pickled_task.receive("<blobs>")


def test_settings_that_change_numbers_are_sent(launched: Path) -> None:
    try:
        torch.set_default_dtype(torch.float64)
        pickled_task.send(blobs(), launched)
        torch.set_default_dtype(torch.float32)
        pickled_task.receive("<blobs>")
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_loader_processes_of_the_worker_are_forks(launched: Path) -> None:
    """Python 3.14's default, forkserver, would look for the classes of a notebook in a module."""
    multiprocessing.set_start_method("forkserver", force=True)
    arrive(blobs(), launched)
    assert multiprocessing.get_start_method() == "fork"


def test_without_cloudpickle_the_extra_is_named(launched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[notebook\]'"):
        pickled_task.send(blobs(), launched)


def test_a_full_disk_is_one_line(launched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pickle, "dump", full)
    with pytest.raises(PacelineError, match=r"task blobs cannot be written to .*: No space left on device; set TMPDIR"):
        pickled_task.send(blobs(), launched)
