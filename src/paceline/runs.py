"""`paceline runs`: the records of a folder as a table in the terminal, the newest last; a study's runs are one line.

Records are found and read as on the board (`board/listing.py`), so damaged folders and links are safe.
"""

import argparse
import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.board.listing import Listing
from paceline.errors import UsageError, printable, unknown
from paceline.output import is_terminal, make_table, plural
from paceline.records import name_for
from paceline.report.summary import duration, figure, rate
from paceline.status import Status

Summary = Mapping[str, Any]

_SHOWN = 20
_LONGEST_NOTE = 200
_STATUSES = [status.value for status in (*Status,) if status not in (Status.REFUSED, Status.INCOMPLETE, Status.UNKNOWN)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder and which records to list."""
    parser.add_argument("--runs-dir", default="runs", metavar="DIR", help="folder of records, or of a study [runs]")
    parser.add_argument("-n", type=int, metavar="N", dest="most", help=f"list the newest N [{_SHOWN}]")
    parser.add_argument("--all", action="store_true", dest="everything", help="list all")
    parser.add_argument("--task", default="", metavar="TASK", help="only runs of this task, including those in studies")
    statuses = ", ".join(_STATUSES)
    parser.add_argument("--status", default="", help=f"only runs with this status, including those in studies: {statuses}")
    parser.add_argument("--json", action="store_true", help="print all records, including those in studies, as JSON")


def run(options: dict[str, Any]) -> int:
    """List the records."""
    folder, most = Path(options["runs_dir"]), options["most"]
    if not folder.exists() and folder == Path("runs"):
        print("no runs yet: paceline train fashion-mnist-mini makes one, in the folder runs")
        return 0
    if not folder.is_dir():
        raise UsageError(f"--runs-dir {folder}: no such folder; give the folder that holds the records")
    if most is not None and most < 1:
        raise UsageError(f"-n is {most}: it must be at least 1")
    found = read_runs(folder, task=options["task"], status=options["status"])
    if options["json"]:
        print(json.dumps(found[-most:] if most else found, indent=1))
        return 0
    filtered = bool(options["task"] or options["status"])
    lines = found if filtered else fold(found)
    shown = lines if options["everything"] else lines[-(most or _SHOWN) :]
    print(describe(shown, len(lines), f"{folder}", filtered))
    return 0


def read_runs(folder: Path, *, task: str = "", status: str = "") -> list[Summary]:
    """The summaries of all records in a folder and one level below, the newest last."""
    if status and status not in _STATUSES:
        raise unknown("value for --status", status, _STATUSES)
    listing = Listing(folder)
    listing.look(everything=True, budget_s=math.inf)
    found = [line for line in listing.changes()["changed"] if line["id"] != "." or line["kind"] == "train"]
    if task:
        found = [line for line in found if line.get("task") and _slug(line["task"]) == _slug(task)]
    if status:
        found = [line for line in found if line["status"] == status]
    if task or status:
        found = [line for line in found if line["kind"] != "study"]  # its runs are listed
    return sorted(found, key=lambda line: (line.get("when") or "", line["id"]))


def _slug(task: str) -> str:
    """A task's name as it is compared: `my_task.py` usually calls itself my-task."""
    return name_for(task).replace("_", "-").lower()


def fold(found: Sequence[Summary]) -> list[Summary]:
    """One line per folder of runs, such as a study, in place of its runs; as new as the newest of them."""
    inner: dict[str, list[Summary]] = {}
    for line in found:
        if "/" in line["id"]:
            inner.setdefault(line["id"].partition("/")[0], []).append(line)
    outer = {line["id"]: line for line in found if "/" not in line["id"]}
    folded = [_folded(id, outer.pop(id, {}), runs) for id, runs in inner.items()]
    return sorted([*outer.values(), *folded], key=lambda line: (line.get("when") or "", line["id"]))


def _folded(id: str, study: Summary, runs: Sequence[Summary]) -> Summary:
    counted = Counter(str(line["status"]) for line in runs)
    tasks = {line.get("task") for line in runs}
    planned = study.get("planned") or 0
    held = f"{len(runs):,} of {planned:,.0f} runs" if planned > len(runs) else plural(len(runs), "run")
    return {
        "id": id,
        "name": f"{id}/",
        "kind": "folder",
        "task": study.get("task") or (tasks.pop() if len(tasks) == 1 else None),
        "status": study.get("status") or (Status.RUNNING if Status.RUNNING in counted else Status.DONE),
        "when": max(line.get("when") or "" for line in runs),
        "runs": f"{held}: {', '.join(f'{count:,} {status}' for status, count in counted.most_common())}",
        "detail": study.get("detail", ""),
    }


def describe(shown: Sequence[Summary], of: int, folder: str, filtered: bool = False) -> str:
    """The table, and below it what the folders hold, why runs failed, and how many older records there are."""
    if not shown:
        return f"no {'matching runs' if filtered else 'records'} in {_plain(folder)}"
    rows = [_row(line) for line in shown]
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 10_000
    columns = _fitting(rows, width)
    units = {line["unit"] for line in shown if line.get("unit")}
    speed = f"{_plain(units.pop())}/s" if len(units) == 1 else "samples/s"
    heads = [speed if name == "speed" else name for name in columns]
    left = sum(name in columns for name in ("name", "status", "task"))
    said = [make_table(heads, [[row[name] for name in columns] for row in rows], left)]
    notes = [f"{row['name']}: {note}" for row, line in zip(rows, shown, strict=True) if (note := _note(line))]
    said += ["", *(note if len(note) <= width else f"{note[: width - 3]}..." for note in notes)] if notes else []
    if of > len(shown):
        said += ["", f"the newest {len(shown):,} of {of:,}: `paceline runs --all` lists all"]
    return "\n".join(said)


_DROPPED_FIRST = ("task", "time", "when", "speed", "epochs", "best", "workers", "metric")


def _fitting(rows: Sequence[Mapping[str, str]], width: int) -> list[str]:
    """The columns that fit next to each other: on a narrow terminal, the less important ones are left out."""
    columns = list(rows[0])
    for name in _DROPPED_FIRST:
        if sum(max(len(column), *(len(row[column]) for row in rows)) + 3 for column in columns) - 3 <= width:
            break
        columns.remove(name)
    return columns


def _row(line: Summary) -> dict[str, str]:
    """The cells of a record, by column."""
    metric = next((name for name in ("accuracy", "loss") if line.get(name) is not None), "")
    of = line.get("monitored") or {"metric": metric, "best": line.get("best") if metric else None, "last": line.get(metric)}
    workers, parts = _count(line.get("workers")), _count(line.get("virtual_workers"))
    speed = line.get("samples_per_s")
    return {
        "name": _plain(line["name"]),
        "status": _plain(str(line["status"])),
        "task": _plain(str(line.get("task") or "")),
        "workers": workers if parts in ("", workers) else f"{workers} (V = {parts})",
        "epochs": _progress(line),
        "metric": _plain(of["metric"]),
        "best": figure(of["best"]) if of["best"] is not None else "",
        "last": figure(of["last"]) if of["last"] is not None else "",
        "speed": _count(speed) if isinstance(speed, Mapping) else rate(speed) if speed else "",
        "when": _local(line.get("when")),
        "time": duration(line["time_s"]) if line.get("time_s") else "",
    }


def _count(value: Any) -> str:
    """A number, or the lowest and highest of a scaling record."""
    if isinstance(value, Mapping):
        return f"{value['low']:,.0f} to {value['high']:,.0f}"
    return "" if value is None else f"{value:,.0f}"


def _progress(line: Summary) -> str:
    for name, word in (("epochs", ""), ("steps", " steps")):
        done, total = line.get(name), line.get(f"total_{name}")
        if done:
            return _count(done) + (f" of {_count(total)}" if total and total != done else "") + word
    return ""


def _note(line: Summary) -> str:
    """What the table does not say: why a run failed, what a folder holds, how a scaling record ended."""
    said = [line.get("runs"), line.get("detail"), line.get("note"), line.get("why")]
    text = "; ".join(_plain(str(each)) for each in said if each)
    return text if len(text) <= _LONGEST_NOTE else f"{text[:_LONGEST_NOTE]}..."


def _local(when: Any) -> str:
    """The time here, to the minute."""
    try:
        return datetime.fromisoformat(when).astimezone().strftime("%Y-%m-%d %H:%M")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _plain(text: str) -> str:
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")
