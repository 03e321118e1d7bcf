"""The runs of a study, one after the other or in slots: processes that take run after run, each on its device.

What a study knows lies in its folder (see `runs.py`), so slots, and studies on several machines that share the folder, never do
a run twice, and what was cut short is taken up again. Nothing at the top of this file imports torch.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.dist.place import threads_per_worker
from paceline.dist.process import python_command
from paceline.errors import PacelineError, Stopped, UsageError
from paceline.records import environment
from paceline.spread import mean
from paceline.study.results import GOOD, make_results, read_run
from paceline.study.runs import ENDED, Call, Planned, changed, claim, explained, perform, read_state, settled, write_json


def do_runs(
    study: Mapping[str, Any], plan: Sequence[Planned], folder: Path, *, only: Sequence[str], per_device: int, out: str
) -> dict[str, Any]:
    """Do what is not done yet, one run a slot at a time; returns the results, which are on disk after every run."""
    todo = [run for run in plan if not only or run.arm in only]
    slots = _slots(todo, per_device)
    with explained(folder):
        (folder / ".claims").mkdir(parents=True, exist_ok=True)
    call = Call(folder, uuid.uuid4().hex)
    teller = _Teller(study, plan, todo, call, out)
    teller.begin(len(slots))
    if per_device > len(slots):
        print("an arm has workers of its own: runs are done one after the other", flush=True)
    slots = slots[: len(teller.left())]
    teller.tell()  # that results can be written shows before a run is spent on it
    try:
        with _sigterm_raises():
            if len(slots) > 1:
                _run_slots(todo, call, slots, teller)
            else:
                with _ticking(teller):
                    work(todo, call, teller)
    except (KeyboardInterrupt, Stopped) as error:
        teller.tell()
        why = "SIGTERM" if isinstance(error, Stopped) and error.exit_code != 130 else "Ctrl-C"
        done = len(todo) - len(teller.left())
        far = f"{done} of {len(todo)} runs are done; the same command goes on from there"
        raise Stopped(f"stopped by {why}: {far}", why) from None
    return teller.tell()


def _slots(runs: Sequence[Planned], per_device: int) -> list[dict[str, str]]:
    """What each slot's environment holds besides ours: its device, or its share of the cores."""
    import torch

    if any((run.resolved.get("workers") or 1) > 1 for run in runs):
        return [{}]  # such a run takes the devices it needs itself
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        share = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads_per_worker(per_device))}
        return [share] * per_device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = [each.strip() for each in visible.split(",")][:count] if visible else [str(i) for i in range(count)]
    return [{"CUDA_VISIBLE_DEVICES": device} for _ in range(per_device) for device in devices]


_PASSED_OVER = 75
"""How a slot ends that left runs to others; were they to give one up, somebody would have to look again."""


def work(runs: Sequence[Planned], call: Call, teller: "_Teller | None" = None) -> bool:
    """Do the runs that nobody else does, one after the other; with a teller, until those of others have ended, too.

    Returns whether it left any to others.
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
            if mine and teller:
                teller.tell()
        if not busy or not teller:
            return busy
        teller.wait()
        time.sleep(1)


def _run_slots(runs: Sequence[Planned], call: Call, slots: Sequence[Mapping[str, str]], teller: "_Teller") -> None:
    """Each slot is a process that takes run after run. One that dies in the middle of a run is started again."""
    grace_s = max(float(run.resolved["grace_s"]) for run in runs) + 10
    with tempfile.TemporaryDirectory(prefix="paceline-") as place:
        plan = Path(place) / "plan.json"
        shared = max(slots.count(env) for env in slots)
        about = {"folder": str(call.folder), "id": call.id, "per_device": shared}
        write_json(plan, {"call": about, "runs": [asdict(run) for run in runs]})
        processes = [_start_slot(plan, call.folder, number, env) for number, env in enumerate(slots)]
        try:
            with _ticking(teller):
                while teller.left():
                    for number, process in enumerate(processes):
                        if process.poll() == UsageError.exit_code:
                            raise UsageError(_refusal(runs, call, number))
                        if process.poll() is not None and _orphans(runs, call):
                            processes[number] = _start_slot(plan, call.folder, number, slots[number])
                    teller.tell()
                    if all(process.poll() is not None for process in processes):
                        if _claimed(teller.left(), call):
                            teller.wait()
                        elif teller.left() and any(process.returncode == _PASSED_OVER for process in processes):
                            processes = [_start_slot(plan, call.folder, 0, slots[0])]
                        else:
                            break
                    time.sleep(0.2)
        finally:
            _end(processes, grace_s)
    teller.tell()
    if teller.left():
        raise PacelineError(_refusal(runs, call, 0))


def _start_slot(plan: Path, folder: Path, number: int, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    command = [*python_command(), "-m", "paceline", "study", str(plan), "--slot", str(os.getpid())]
    with (folder / f"slot-{number}.log").open("ab") as log:
        return subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log, start_new_session=True)


def _orphans(runs: Sequence[Planned], call: Call) -> bool:
    """Whether there is a run of this call that nobody does and that did not end."""
    for run in runs:
        state = read_state(call, run)
        if state.get("call") == call.id and state.get("status") == "running":
            with claim(call, run) as mine:
                if mine and read_state(call, run).get("status") == "running":
                    return True
    return False


def _claimed(runs: Sequence[Planned], call: Call) -> bool:
    """Whether another process does one of them."""
    for run in runs:
        with claim(call, run) as mine:
            if not mine:
                return True
    return False


def _refusal(runs: Sequence[Planned], call: Call, number: int) -> str:
    """Why a slot ended before all was done."""
    states = [read_state(call, run) for run in runs]
    said = [str(state["why"]) for state in states if state.get("status") == "refused" and state.get("call") == call.id]
    log = call.folder / f"slot-{number}.log"
    return said[0] if said else f"a slot ended before all was done: see {log}; the same command goes on"


def _end(processes: Sequence["subprocess.Popen[bytes]"], grace_s: float) -> None:
    """Let each finish its step and write a checkpoint; then end it."""
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


def work_as_slot(plan: Path, parent: str) -> int:
    """The process of a slot: it ends with the study's, by SIGTERM, which a run answers with a checkpoint."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if str(os.getppid()) != parent:
        return 1  # it was already gone
    told = json.loads(plan.read_text())
    call = Call(**{**told["call"], "folder": Path(told["call"]["folder"])})
    with _sigterm_raises():
        passed_over = work([Planned(**each) for each in told["runs"]], call)
    return _PASSED_OVER if passed_over else 0


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM between two runs is a wish to stop, too."""

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


class _Teller:
    """Says which runs have ended, once each, and keeps the results on disk."""

    def __init__(
        self, study: Mapping[str, Any], plan: Sequence[Planned], todo: Sequence[Planned], call: Call, out: str
    ) -> None:
        self._study, self._plan, self._todo, self._call = study, plan, todo, call
        self._paths = {call.folder / "study.json": "--runs-dir", **({Path(out): "--out"} if out else {})}
        self._environment = environment()
        self._told = {run.name for run in todo if settled(call, run)}
        self._entries: dict[str, dict[str, Any]] = {}
        self._slots = 1
        self._waits = False
        self._last: dict[str, Any] = {}

    def begin(self, slots: int) -> None:
        """Before the first run."""
        study, self._slots = self._study, slots
        before = f", {len(self._told)} of them done before" if self._told else ""
        at_once = f"; {slots} at once" if slots > 1 else ""
        arms = f"{_counted(study['arms'], 'arm')} x {_counted(study['seeds'], 'seed')}"
        runs = f"{_counted(self._todo, 'run')}{before}{at_once}"
        print(f"{study['name']}: {arms} on {study['task']}, {runs}; records in {self._call.folder}", flush=True)

    def left(self) -> list[Planned]:
        """Runs that are still to do."""
        return [run for run in self._todo if not settled(self._call, run)]

    def wait(self) -> None:
        """Others have the rest."""
        if not self._waits:
            self._waits = True
            self._line("the runs that are left are being done by another process: waiting for it")

    def tell(self) -> dict[str, Any]:
        """A line for each run that has ended since; the results, written anew if there was one."""
        new = [run for run in self._todo if run.name not in self._told and settled(self._call, run)]
        if new or not self._last:
            self._last = self._results()
            for path, option in self._paths.items():
                write_json(path, self._last, option)
        for run in new:
            if run.name in self._entries:  # else another process has begun it again just now
                self._told.add(run.name)
                count = f"[{len(self._told)}/{len(self._todo)}]"
                self._line(f"{count} {run.arm}, seed {run.seed}: {self._words(run)}{self._left_words()}")
        return self._last

    def now(self) -> str:
        """What is going on, for a terminal's last line."""
        running = []
        for run in self._todo:
            state = read_state(self._call, run)
            if state.get("status") == "running" and run.name not in self._told:
                epoch = _last_epoch(self._call.folder / run.name)
                running.append(f"{run.arm}, seed {run.seed} (epoch {epoch} of {run.resolved['epochs']})")
        more = f" and {len(running) - 2} more" if len(running) > 2 else ""
        return f"{len(self._told)} of {len(self._todo)} done; now {'; '.join(running[:2])}{more}{self._left_words()}"

    def _results(self) -> dict[str, Any]:
        for run in self._plan:
            state = read_state(self._call, run)
            ended = state.get("status") in (*ENDED, "failed") and not changed(state, run)
            if not ended:
                self._entries.pop(run.name, None)
            elif run.name not in self._entries or self._entries[run.name]["status"] != state["status"]:
                self._entries[run.name] = read_run(self._call.folder / run.name, state, self._study["target_accuracy"])
        runs = [self._entries[run.name] for run in self._plan if run.name in self._entries]
        return make_results(self._study, runs, self._environment)

    def _words(self, run: Planned) -> str:
        entry, note = self._entries[run.name], read_state(self._call, run).get("note", "")
        note = f" ({note})" if note else ""
        if entry["status"] not in GOOD:
            why = entry["why"].partition("; try ")[0].removeprefix(f"{entry['status']}: ")
            return f"{entry['status']}: {why}{note}"
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in entry["metrics"].items())
        return f"{metrics}, {entry['train_time_s']:.1f} s of training, {entry['samples_per_s']:,.0f} samples/s{note}"

    def _left_words(self) -> str:
        """How long it will take, by what each arm's runs took, or all of them; before one has ended, by its epochs so far."""
        took: dict[str, list[float]] = {}
        running: dict[str, float] = {}
        for run in self._todo:
            state = read_state(self._call, run)
            if run.name in self._told and state.get("wall_s"):
                took.setdefault(run.arm, []).append(state["wall_s"])
            elif run.name not in self._told and state.get("status") == "running":
                running[run.name] = time.time() - state["begin"]
                done = _last_epoch(self._call.folder / run.name) - 1
                if not took and done > 0:
                    took[run.arm] = [running[run.name] * run.resolved["epochs"] / done]
        rest = [run for run in self._todo if run.name not in self._told]
        if not took or not rest:
            return ""
        usual = mean([mean(times) for times in took.values()])
        each = [mean(took.get(run.arm, [usual])) - running.get(run.name, 0.0) for run in rest]
        left_s = sum(max(0.0, left) for left in each) / min(self._slots, len(rest))
        return f"; about {f'{left_s:.0f} s' if left_s < 100 else f'{left_s / 60:.0f} min'} left"

    def _line(self, text: str) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        print(text, flush=True)


@contextmanager
def _ticking(teller: _Teller) -> Iterator[None]:
    """On a terminal, a line that says every second what is going on."""
    if not sys.stderr.isatty():
        yield
        return
    end = threading.Event()

    def tick() -> None:
        while not end.wait(1):
            with suppress(Exception):  # a line on the screen is no reason to end a study
                columns = os.get_terminal_size(2).columns or 80
                print(f"\r{teller.now()[: columns - 1]}\x1b[K", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tick, name="paceline-ticker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _counted(what: Sized, name: str) -> str:
    return f"{len(what)} {name}{'s' * (len(what) != 1)}"


def _last_epoch(record: Path) -> int:
    """The epoch of the record's last row."""
    try:
        with (record / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            return int(json.loads(file.read().splitlines()[-1])["epoch"])
    except (OSError, ValueError, KeyError, IndexError):
        return 1
