"""Train the runs of a study one at a time, or in slots: processes that each train run after run on their device.

All state of a study is in its folder (see `runs.py`). So slots, and studies on several machines that share the folder, never
train a run twice, and runs that were cut short are resumed. Nothing at the top of this file imports torch.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.dist.place import threads_per_worker
from paceline.dist.process import python_command
from paceline.errors import PacelineError, Stopped, UsageError
from paceline.files import read_json, write_json
from paceline.output import plural
from paceline.status import Status
from paceline.study.progress import Progress
from paceline.study.runs import Call, RunSpec, claim, explained, perform, read_state, settled


def do_runs(
    study: Mapping[str, Any], runs: Sequence[RunSpec], folder: Path, *, only: Sequence[str], per_device: int, out: str
) -> dict[str, Any]:
    """Train the runs that are not done yet, one per slot at a time. Returns the results, which are on disk after every run."""
    todo = [run for run in runs if not only or run.arm in only]
    slots = _slots(todo, per_device)
    with explained(folder):
        (folder / ".claims").mkdir(parents=True, exist_ok=True)
    call = Call(folder, uuid.uuid4().hex)
    progress = Progress(study, runs, todo, call, out)
    progress.start(len(slots))
    if per_device > len(slots):
        print("an arm sets workers, so runs are trained one at a time", flush=True)
    slots = slots[: len(progress.left())]
    progress.update()  # fails now if results cannot be written, before any time is spent on a run
    try:
        with _sigterm_raises():
            if len(slots) > 1:
                _run_slots(todo, call, slots, progress)
            else:
                with progress.bar():
                    work(todo, call, progress)
    except (KeyboardInterrupt, Stopped) as error:
        progress.update()
        why = "SIGTERM" if isinstance(error, Stopped) and error.exit_code != 130 else "Ctrl-C"
        done = len(todo) - len(progress.left())
        of = f"{plural(len(todo), 'run')} {'is' if len(todo) == 1 else 'are'} done"
        raise Stopped(f"stopped by {why}: {done} of {of}; run the same command to continue", why) from None
    return progress.update()


def _slots(runs: Sequence[RunSpec], per_device: int) -> list[dict[str, str]]:
    """The variables to add to each slot's environment: its device, or its share of the cores."""
    import torch

    if any((run.resolved.get("workers") or 1) > 1 for run in runs):
        return [{}]  # such a run chooses its devices itself
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        share = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads_per_worker(per_device))}
        return [share] * per_device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = [each.strip() for each in visible.split(",")][:count] if visible else [str(i) for i in range(count)]
    return [{"CUDA_VISIBLE_DEVICES": device} for _ in range(per_device) for device in devices]


_SKIPPED = 75
"""Exit code of a slot that skipped runs claimed by other processes. If such a process gives up, its runs need a new slot."""


def work(runs: Sequence[RunSpec], call: Call, progress: Progress | None = None) -> bool:
    """Train the runs that no other process has claimed, one after the other. With `progress`, also wait for the others to end.

    Returns whether it skipped any.
    """
    while True:
        busy = False
        for run in runs:
            if settled(call, run):
                continue
            with claim(call, run) as mine:
                busy |= not mine
                if mine and not settled(call, run):
                    perform(call, run)
            if mine and progress:
                progress.update()
        if not busy or not progress:
            return busy
        progress.note_waiting()
        time.sleep(1)


def _run_slots(runs: Sequence[RunSpec], call: Call, slots: Sequence[Mapping[str, str]], progress: Progress) -> None:
    """Start the slots and wait for all runs. A slot that dies in the middle of a run is started again."""
    grace_s = max(float(run.resolved["grace_s"]) for run in runs) + 10
    with tempfile.TemporaryDirectory(prefix="paceline-") as place:
        work_list = Path(place) / "runs.json"
        shared = max(slots.count(env) for env in slots)
        about = {"folder": str(call.folder), "id": call.id, "per_device": shared}
        with explained(work_list.parent, "TMPDIR"):
            write_json(work_list, {"call": about, "runs": [asdict(run) for run in runs]})
        processes = [_start_slot(work_list, call.folder, number, env) for number, env in enumerate(slots)]
        try:
            with progress.bar():
                while progress.left():
                    for number, process in enumerate(processes):
                        if process.poll() == UsageError.exit_code:
                            raise UsageError(_why_ended(runs, call, number))
                        if process.poll() is not None and _orphans(runs, call):
                            processes[number] = _start_slot(work_list, call.folder, number, slots[number])
                    progress.update()
                    if all(process.poll() is not None for process in processes):
                        if _claimed(progress.left(), call):
                            progress.note_waiting()
                        elif progress.left() and any(process.returncode == _SKIPPED for process in processes):
                            processes = [_start_slot(work_list, call.folder, 0, slots[0])]
                        else:
                            break
                    time.sleep(0.2)
        finally:
            _end(processes, grace_s)
    progress.update()
    if progress.left():
        raise PacelineError(_why_ended(runs, call, 0))


def _start_slot(work_list: Path, folder: Path, number: int, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    command = [*python_command(), "-m", "paceline", "study", str(work_list), "--slot", str(os.getpid())]
    with (folder / f"slot-{number}.log").open("ab") as log:
        return subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log, start_new_session=True)


def _orphans(runs: Sequence[RunSpec], call: Call) -> bool:
    """Whether a run of this call has not ended and is claimed by no process."""
    for run in runs:
        state = read_state(call, run)
        if state.get("call") == call.id and state.get("status") == Status.RUNNING:
            with claim(call, run) as mine:
                if mine and read_state(call, run).get("status") == Status.RUNNING:
                    return True
    return False


def _claimed(runs: Sequence[RunSpec], call: Call) -> bool:
    """Whether another process has claimed any of these runs."""
    for run in runs:
        with claim(call, run) as mine:
            if not mine:
                return True
    return False


def _why_ended(runs: Sequence[RunSpec], call: Call, number: int) -> str:
    """Why a slot ended early."""
    states = [read_state(call, run) for run in runs]
    said = [str(state["why"]) for state in states if state.get("status") == Status.REFUSED and state.get("call") == call.id]
    log = call.folder / f"slot-{number}.log"
    return said[0] if said else f"a slot ended early: see {log}; run the same command to continue"


def _end(processes: Sequence["subprocess.Popen[bytes]"], grace_s: float) -> None:
    """Ask each process to finish its step and write a checkpoint; kill it after the grace time."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def work_as_slot(work_list: Path, parent: str) -> int:
    """The main function of a slot's process. It gets SIGTERM when the study's process ends; its run writes a checkpoint."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if str(os.getppid()) != parent:
        return 1  # the study's process has already ended
    given = read_json(work_list)
    call = Call(**{**given["call"], "folder": Path(given["call"]["folder"])})
    with _sigterm_raises():
        skipped = work([RunSpec(**each) for each in given["runs"]], call)
    return _SKIPPED if skipped else 0


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Raise Stopped on SIGTERM, between runs too."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped("stopped by SIGTERM", "SIGTERM")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
