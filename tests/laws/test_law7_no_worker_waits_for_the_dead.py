"""Law 7: a failure ends the run within seconds, the first thing shown is the error of the worker that failed first, with the
line of the user's code that raised it, and no process is left."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from harness.processes import paceline, tagged

TASK = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
from paceline import Arrays, Task

STEP, KIND = {step}, {kind!r}
seen = 0

def fail():
    if KIND == "raise":
        raise ValueError("this is what went wrong")
    if KIND == "exit":
        os._exit(7)
    if KIND == "exit 0":
        os._exit(0)
    if KIND == "sys.exit":
        sys.exit(0)
    if KIND == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    if KIND == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)

def objective(model, batch):
    global seen
    if model.training and dist.get_rank() == 1 and seen == STEP:
        fail()
    seen += model.training
    if KIND == "forever":
        time.sleep(0.02)
    x, y = batch
    return {{"loss": (model(x) - y).square().squeeze(1)}}

def data():
    if KIND == "data" and dist.get_rank() == 1:
        raise OSError("no such disk")
    x = torch.randn(5000, 1)
    return Arrays((x, x))

def task():
    return Task(name="doomed", model=lambda: nn.Linear(1, 1), train=data, validation=data, objective=objective,
                defaults={{"global_batch": 10, "base_lr": 0.01, "log_every": 1, "epochs": 1000}})
"""


@pytest.fixture
def tag() -> Iterator[str]:
    """A variable that every process of the run inherits, to find the ones left behind."""
    tag = uuid.uuid4().hex
    yield tag
    for pid in tagged(tag):
        os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)


def write_task(kind: str, step: int = 3) -> str:
    Path("doomed.py").write_text(TASK.format(kind=kind, step=step))
    return "doomed.py"


@pytest.mark.parametrize(
    ("kind", "first_line", "also"),
    [
        ("raise", "paceline: worker 1 failed first: ValueError: this is what went wrong", "doomed.py, line 13, in fail"),
        ("data", "paceline: worker 1 failed first: OSError: no such disk", "doomed.py, line 39, in data"),
        ("exit", "paceline: worker 1 ended with exit code 7 and no error message", ""),
        ("exit 0", "paceline: worker 1 ended with exit code 0 before the run was done: does the task call sys.exit", ""),
        ("sys.exit", "paceline: sys.exit(0) was called in fail, line 19 of doomed.py: the run is not done", ""),
        ("terminate", "paceline: worker 1 was killed by SIGTERM", ""),
        ("kill", "paceline: worker 1 was killed by SIGKILL", "out of memory"),
        ("segv", "paceline: worker 1 was killed by SIGSEGV", ""),
    ],
)
def test_the_failing_worker_is_shown_first(kind: str, first_line: str, also: str, runs: Path, tag: str) -> None:
    done = paceline("train", write_task(kind), "--workers", "3", "--global-batch", "12", env={"TAG": tag}, timeout_s=60)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith(first_line), done.stderr
    assert also in done.stderr
    if kind in ("raise", "data"):
        assert lines[1] == f"  {also}"
        assert lines[2].strip().startswith("raise ")
        assert lines[3].startswith("(for the whole traceback, add --traceback")
    if kind != "kill":
        assert len(lines) == (4 if kind in ("raise", "data") else 1), "nothing of the other workers follows"
    assert not tagged(tag)
    records = list(runs.glob("*"))
    if kind == "data":
        assert not records, "a run that never began leaves no record"
    else:
        result = json.loads((records[0] / "result.json").read_text())
        assert result["status"] == "failed"
        assert result["why"].startswith(first_line.removeprefix("paceline: "))
        if kind == "raise":
            assert result["where"].startswith(also)
            assert result["traceback"].endswith("ValueError: this is what went wrong")
        for line in (records[0] / "metrics.jsonl").read_text().splitlines():
            assert json.loads(line)["kind"] == "step"


def start(tag: str, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", "train", write_task("forever", step=-1), *args]
    return subprocess.Popen(command, env={**os.environ, "TAG": tag}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_ends_everything_and_keeps_the_record(workers: str, runs: Path, tag: str) -> None:
    process = start(tag, "--workers", workers)
    wait_until(lambda: any(path.stat().st_size for path in runs.glob("*/metrics.jsonl")), "the first step")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 130, err
    (line,) = err.splitlines()
    assert line.startswith("paceline: stopped by Ctrl-C after step")
    assert line.endswith("a checkpoint was written; the same command with --resume continues")
    assert not tagged(tag)
    (record,) = runs.glob("*")
    assert json.loads((record / "result.json").read_text())["status"] == "interrupted"
    assert (record / "metrics.jsonl").read_text().endswith("}\n")
    assert not list(record.glob(".*"))


def test_workers_die_with_a_killed_launcher(runs: Path, tag: str) -> None:
    process = start(tag, "--workers", "2")
    wait_until(lambda: any(path.stat().st_size for path in runs.glob("*/metrics.jsonl")), "the first step")
    assert len(tagged(tag)) == 3
    process.kill()
    process.communicate()
    wait_until(lambda: not tagged(tag), "the workers to end", 20)


def test_a_peer_killed_from_outside_while_others_wait(runs: Path, tag: str) -> None:
    process = start(tag, "--workers", "2")
    wait_until(lambda: any(path.stat().st_size for path in runs.glob("*/metrics.jsonl")), "the first step")
    workers = [pid for pid in tagged(tag) if pid != process.pid]
    victim = next(pid for pid in workers if psutil.Process(pid).environ().get("RANK") == "1")
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 1
    assert err.startswith("paceline: worker 1 was killed by SIGKILL")
    assert not tagged(tag)


STREAMED = """
import os, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info
import neighbor
from paceline import Task

class Data(Dataset):
    def __init__(self, hangs):
        self.hangs = hangs

    def __len__(self):
        return 40

    def __getitem__(self, i):
        if get_worker_info() is not None:
            for fd in Path("/proc/self/fd").iterdir():
                try:
                    assert "metrics.jsonl" not in os.readlink(fd), "this process holds the record's lock"
                except FileNotFoundError:  # another thread has closed it
                    continue
            if self.hangs:
                Path("hangs").touch()
                time.sleep(1e6)
        return torch.ones(1), torch.ones(1)

def objective(model, batch):
    return {{"loss": (model(batch[0]) - batch[1]).square().squeeze(1)}}

def task():
    return Task(name="streamed", model=lambda: nn.Linear(1, 1), objective=objective,
                train=lambda: Data({train}), validation=lambda: Data({validation}),
                defaults={{"global_batch": 10, "base_lr": 0.01, "epochs": 1, "loader_workers": 2}})
"""


def write_streamed(hangs_in: str = "") -> str:
    Path("neighbor.py").touch()
    Path("streamed.py").write_text(STREAMED.format(train=hangs_in == "training", validation=hangs_in == "validation"))
    return "streamed.py"


def test_a_loader_that_hangs_in_validation_is_named(runs: Path, tag: str) -> None:
    flags = ["--workers", "2", "--timeout-s", "12"]
    done = paceline("train", write_streamed("validation"), *flags, env={"TAG": tag}, timeout_s=60)
    assert done.returncode == 1
    assert "hung: no progress for 12 s at step 3, in validation" in done.stderr.splitlines()[0], done.stderr
    wait_until(lambda: not tagged(tag), "the loader processes to end", 20)


def test_loader_processes_that_hang_die_with_their_worker(runs: Path, tag: str) -> None:
    command = [sys.executable, "-m", "paceline", "train", write_streamed("training")]
    process = subprocess.Popen(
        command, env={**os.environ, "TAG": tag}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(Path("hangs").exists, "a loader process to hang")
    assert len(tagged(tag)) == 5, "a worker, and two processes for each of its data sets"
    process.kill()
    process.communicate(timeout=20)  # they hold its output
    wait_until(lambda: not tagged(tag), "the loader processes to end", 20)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_run_touches_nothing_but_its_record(workers: str, runs: Path, tag: str) -> None:
    """It leaves no temporary file and no process, and modules in the user's folder do not replace the standard library's."""
    temporary = runs.parent / ("temporary" * 8)  # too long for a socket within it
    temporary.mkdir()
    for name in ("queue", "statistics", "random", "socket", "logging"):
        Path(f"{name}.py").write_text(f"open('imported-{name}', 'w').close()\nraise ImportError('not the standard library')\n")
    env = {"TAG": tag, "TMPDIR": str(temporary)}
    done = paceline("train", write_streamed(), "--workers", workers, env=env, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert not tagged(tag)
    assert not list(Path.cwd().glob("imported-*"))
    left = {path.name for path in temporary.iterdir()}
    assert all(name.startswith("torchinductor_") for name in left), left  # torch's own cache, one for all runs


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_closed_terminal_stops_the_run_with_a_checkpoint(workers: str, runs: Path, tag: str) -> None:
    """Its SIGHUP does what SIGTERM does, although nothing can be written to the terminal any more."""
    task = write_task("forever", step=-1)
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TAG"] = tag
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-m", "paceline", "train", task, "--workers", workers])
    close = threading.Event()
    reader = threading.Thread(target=read_until, args=(terminal, close))
    reader.start()
    try:
        wait_until(lambda: any(path.stat().st_size for path in runs.glob("*/metrics.jsonl")), "the first step")
    finally:
        close.set()
        reader.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 143
    (record,) = runs.glob("*")
    result = json.loads((record / "result.json").read_text())
    assert (result["status"], result["why"].partition(" after")[0]) == ("interrupted", "stopped by SIGHUP")
    assert list(record.glob("checkpoints/step-*.safetensors"))
    assert not tagged(tag)


def read_until(terminal: int, close: threading.Event) -> None:
    """Read what a program writes to its terminal, or it would wait for that; then close the terminal."""
    with suppress(OSError):  # the program ended
        while not close.is_set():
            if select.select([terminal], [], [], 0.05)[0]:
                os.read(terminal, 65536)
    os.close(terminal)


def test_divergence_ends_all_workers_with_code_3(runs: Path, tag: str) -> None:
    done = paceline(
        "train", "fashion-mnist-mini", "--workers", "2", "--base-lr", "1e9", "--model", "linear", env={"TAG": tag}, timeout_s=60
    )
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in ("step ", "lr ", "global batch 256", "try a lower --base-lr"))
    assert not tagged(tag)
    (record,) = runs.glob("*")
    assert json.loads((record / "result.json").read_text())["status"] == "diverged"
