"""The progress of a study: one line per finished run, results on disk after each, and on a terminal a progress bar."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.files import write_file, write_json
from paceline.output import is_terminal, plural
from paceline.records import environment
from paceline.spread import mean
from paceline.status import Status
from paceline.study.results import make_results, markdown, read_run
from paceline.study.runs import Call, RunSpec, changed, explained, read_state, settled

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Progress:
    """Prints each run once when it has ended, and keeps the results on disk up to date."""

    def __init__(
        self, study: Mapping[str, Any], runs: Sequence[RunSpec], todo: Sequence[RunSpec], call: Call, out: str
    ) -> None:
        self._study, self._runs, self._todo, self._call = study, runs, todo, call
        self._paths = {call.folder / "study.json": "--runs-dir", **({Path(out): "--out"} if out else {})}
        self._environment = environment()
        self._printed = {run.name for run in todo if settled(call, run)}
        self._entries: dict[str, dict[str, Any]] = {}
        self._slots = 1
        self._waits = False
        self._results: dict[str, Any] = {}
        self._console: Console | None = None

    def start(self, slots: int) -> None:
        """Print what is about to happen."""
        study, self._slots = self._study, slots
        before = f", {len(self._printed)} already done" if self._printed else ""
        at_once = f", {slots} at a time" if slots > 1 else ""
        arms = f"{plural(len(study['arms']), 'arm')} x {plural(len(study['seeds']), 'seed')}"
        runs = f"{plural(len(self._todo), 'run')}{before}{at_once}"
        print(f"{study['name']}: {arms} on {study['task']}: {runs}; records in {self._call.folder}", flush=True)

    def left(self) -> list[RunSpec]:
        """The runs that are still to do."""
        return [run for run in self._todo if not settled(self._call, run)]

    def note_waiting(self) -> None:
        """Print, once, that only another process's runs are left."""
        if not self._waits:
            self._waits = True
            self._print("another process is training the remaining runs: waiting for it")

    def update(self) -> dict[str, Any]:
        """Print each run that has ended since the last update, and write the results if there was one. Returns the results."""
        new = [run for run in self._todo if run.name not in self._printed and settled(self._call, run)]
        if new or not self._results:
            self._results = self._make_results()
            for path, option in self._paths.items():
                with explained(path.parent, option):
                    write_json(path, self._results, indent=1)
            with explained(self._call.folder):
                write_file(self._call.folder / "results.md", markdown(self._results))
        for run in new:
            if run.name in self._entries:  # if not, another process has just started it again
                self._printed.add(run.name)
                count = f"[{len(self._printed)}/{len(self._todo)}]"
                self._print(f"{count} {run.arm}, seed {run.seed}: {self._describe(run)}{self._describe_left()}")
        return self._results

    @contextmanager
    def bar(self) -> Iterator[None]:
        """Show a progress bar below the lines while the block lasts, if stderr is a terminal."""
        if not is_terminal(sys.stderr):
            yield
            return
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)  # not stdout, which goes to a run's log while it trains
        try:
            with Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=1,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            ):
                yield
        finally:
            self._console = None

    def _render(self) -> "RenderableType":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        try:
            text = self._describe_now()
        except Exception:  # a progress bar must not end a study
            text = ""
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=len(self._todo), completed=len(self._printed), width=20)
        row.add_row(bar, Text(text, no_wrap=True, overflow="ellipsis"))
        return row

    def _describe_now(self) -> str:
        """The runs in training, and the time left."""
        running = []
        for run in self._todo:
            state = read_state(self._call, run)
            if state.get("status") == Status.RUNNING and run.name not in self._printed:
                epoch = _last_epoch(self._call.folder / run.name)
                running.append(f"{run.arm}, seed {run.seed} (epoch {epoch} of {run.resolved['epochs']})")
        more = f" and {len(running) - 2} more" if len(running) > 2 else ""
        now = f"; now {'; '.join(running[:2])}{more}" if running else ""
        return f"{len(self._printed)} of {len(self._todo)} done{now}{self._describe_left()}"

    def _make_results(self) -> dict[str, Any]:
        for run in self._runs:
            state = read_state(self._call, run)
            status = Status(state.get("status", ""))
            if not (status.final or status is Status.FAILED) or changed(state, run):
                self._entries.pop(run.name, None)
            elif run.name not in self._entries or self._entries[run.name]["status"] != state["status"]:
                self._entries[run.name] = read_run(self._call.folder / run.name, state, self._study["target_accuracy"])
        entries = [self._entries[run.name] for run in self._runs if run.name in self._entries]
        return make_results(self._study, entries, self._environment)

    def _describe(self, run: RunSpec) -> str:
        entry, note = self._entries[run.name], read_state(self._call, run).get("note", "")
        note = f" ({note})" if note else ""
        if not Status(entry["status"]).good:
            why = entry["why"].partition("; try ")[0].removeprefix(f"{entry['status']}: ")
            at = entry.get("where", "").partition("\n")[0]
            return f"{entry['status']}: {why}{f' ({at})' if at else ''}{note}"
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in entry["metrics"].items())
        return f"{metrics}, {entry['train_time_s']:.1f} s of training, {entry['samples_per_s']:,.0f} samples/s{note}"

    def _describe_left(self) -> str:
        """The time left, from the mean time of each arm's finished runs, or of all of them.

        Before the first run has finished, from the epochs that it has done.
        """
        took: dict[str, list[float]] = {}
        running: dict[str, float] = {}
        for run in self._todo:
            state = read_state(self._call, run)
            if run.name in self._printed and state.get("wall_s"):
                took.setdefault(run.arm, []).append(state["wall_s"])
            elif run.name not in self._printed and state.get("status") == Status.RUNNING:
                running[run.name] = time.time() - state["begin"]
                done = _last_epoch(self._call.folder / run.name) - 1
                if not took and done > 0:
                    took[run.arm] = [running[run.name] * run.resolved["epochs"] / done]
        rest = [run for run in self._todo if run.name not in self._printed]
        if not took or not rest:
            return ""
        usual = mean([mean(times) for times in took.values()])
        each = [mean(took.get(run.arm, [usual])) - running.get(run.name, 0.0) for run in rest]
        left_s = sum(max(0.0, left) for left in each) / min(self._slots, len(rest))
        return f"; about {f'{left_s:.0f} s' if left_s < 100 else f'{left_s / 60:.0f} min'} left"

    def _print(self, text: str) -> None:
        if self._console and is_terminal(sys.stdout):  # above the bar, on the same terminal
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)


def _last_epoch(record: Path) -> int:
    """The epoch of the record's last row."""
    try:
        with (record / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            return int(json.loads(file.read().splitlines()[-1])["epoch"])
    except (OSError, ValueError, KeyError, IndexError):
        return 1
