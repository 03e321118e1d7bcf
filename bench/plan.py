"""How far off `paceline plan` is: fitted on 1 and 2 workers, predicted for more, then measured.

    python bench/plan.py [--cases loopback,1gbit,100mbit] [--counts 1,2,3,4] [--out bench/results/plan.json]
    python bench/plan.py --table       # the committed result as Markdown, for docs/plan.md

Tasks: nets on the built-in data, and `tasks/sleeper.py`, which sleeps instead of computing. It stands in for workers that have
a device each, so that the result does not only measure the machine's few cores. Three links: loopback and, as root, network
namespaces with one worker each on a bridge with cables that `tc` shapes to 1 Gbit/s and 100 Mbit/s. `paceline scale` measures
every number of workers. Predictions are those of `paceline plan`, made in two ways: *fitted*, from the record cut down to 1 and
2 workers (`--cluster here`), and, for shaped links, *from the file*: 1 and 2 workers on loopback, and a cluster TOML with only
the cable's nominal rate. `--cores` says what a record cannot know: sleeper's workers share no cores, namespaces share all.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from measurement import Node, write
from paceline.plan.measured import Measured, read_measured
from paceline.plan.plan import Request, make_plan

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results" / "plan.json"
FIT_ON = 2  # most workers that a fit may see
NOMINAL = """name = "nominal"
about = "one worker per node, a cable's nominal rate, TCP's share of it as in the preset gigabit-lab"
workers_per_node = 1
trees = false
inter = {{latency_us = 150, bandwidth_GBps = {rate:g}, efficiency = {{typical = 0.92, low = 0.8, high = 0.949}}}}
"""
TASKS = {
    "cnn": ["fashion-mnist-mini", "--model", "cnn"],
    "resnet": ["fashion-mnist-mini", "--model", "resnet:depth=8"],
    "mlp": ["fashion-mnist-mini", "--model", "mlp:width=1024"],
    "sleeper": [str(BENCH / "tasks" / "sleeper.py")],
}
BURSTS = {"loopback": "", "1gbit": "128kb", "100mbit": "32kb"}
"""Bytes that tc lets pass unshaped. With 64 kB, tc reaches only half of 1 Gbit/s. With 128 kB, cnn's gradient of 118 kB passes
unshaped."""

GB_PER_S = {"1gbit": 0.125, "100mbit": 0.0125}
WORDS = {"loopback": "loopback", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}


def main() -> None:
    """Measure, predict, print and write the result."""
    args = parse()
    if args.table:
        print(table(json.loads(Path(args.out).read_text())))
        return
    counts, tasks, links = [int(each) for each in args.counts.split(",")], args.tasks.split(","), args.cases.split(",")
    runs = Path(args.keep or tempfile.mkdtemp(prefix="paceline-plan-"))
    try:
        for task in tasks:
            for link in links:
                measure(runs, task, link, counts, args)
        result = {
            "what": "samples/s predicted from 1 and 2 workers against measured ones; error = predicted / measured - 1",
            "n": f"medians of {args.windows} windows of {args.window_s:g} s per number of workers",
            "cases": [case for task in tasks for link in links for case in judge(runs, task, link)],
        }
    finally:
        if not args.keep:
            shutil.rmtree(runs, ignore_errors=True)
    print(table(result))
    write(args.out, result)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="cnn,sleeper", help=f"any of {', '.join(TASKS)}")
    parser.add_argument("--cases", default=",".join(BURSTS), help="links to measure; all except loopback need root")
    parser.add_argument("--counts", default="1,2,3,4")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--keep", default="", metavar="DIR", help="keep the records here; existing ones are not measured again")
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--table", action="store_true", help="measure nothing; print the result as Markdown")
    return parser.parse_args(argv)


def measure(runs: Path, task: str, link: str, counts: Sequence[int], args: argparse.Namespace) -> None:
    """Make a record with all numbers of workers of a task on a link."""
    if (runs / f"{task}-{link}" / "scale.json").exists():
        return
    flags = [*TASKS[task], "--name", f"{task}-{link}", "--runs-dir", str(runs)]
    flags += ["--windows", str(args.windows), "--window-s", str(args.window_s)]
    print(f"{task} on {WORDS[link]}", flush=True)
    if link == "loopback":
        start([[*PACELINE, *flags, "--workers", ",".join(map(str, counts))]])
        return
    with nodes_on_a_bridge(max(counts), link, BURSTS[link]) as nodes:
        for count in counts:
            common = [*PACELINE, *flags, "--workers", "1"]
            if count > 1:
                common += ["--nodes", str(count), "--rendezvous", f"{nodes[0].address}:{21600 + count}"]
            start([nodes[i].command(*common, *(["--node-id", str(i)] if count > 1 else [])) for i in range(count)])


PACELINE = [sys.executable, "-m", "paceline", "scale"]


def start(commands: Sequence[Sequence[str]], timeout_s: float = 900) -> None:
    """Run these commands at the same time and wait for all; one thread per worker, for any number of workers."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) for command in commands]
    end = time.monotonic() + timeout_s
    try:
        codes = [process.wait(timeout=max(1.0, end - time.monotonic())) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(codes):
        raise SystemExit(f"exit codes {codes}: {' '.join(commands[0])}")


def judge(runs: Path, task: str, link: str) -> list[dict[str, Any]]:
    """Compare predictions of one record with its measurements."""
    record = runs / f"{task}-{link}"
    whole = read_measured(record)
    cores = cores_flag(task, link, whole)
    fitted = Request(record=str(cut(record, FIT_ON)), cluster="here", cores=cores)
    cases = [compare(fitted, whole, {"task": task, "link": link, "how": "fitted", "known": FIT_ON})]
    if link != "loopback" and (runs / f"{task}-loopback").exists():
        file = runs / f"{link}.toml"
        file.write_text(NOMINAL.format(rate=GB_PER_S[link]))
        filed = Request(record=str(cut(runs / f"{task}-loopback", FIT_ON)), cluster=str(file), cores=cores)
        cases.append(compare(filed, whole, {"task": task, "link": link, "how": "from the file", "known": 1}))
    return cases


def cores_flag(task: str, link: str, whole: Measured) -> str:
    """The value of `--cores`: sleeper uses no core; namespaces look like nodes but share one machine."""
    if task == "sleeper":
        return "none"
    return "" if link == "loopback" or whole.cores is None else str(whole.cores)


def cut(record: Path, most: int) -> Path:
    """The record with at most `most` workers, as if no more had been measured."""
    found = json.loads((record / "scale.json").read_text())
    for name in ("counts", "links"):
        found[name] = [each for each in found[name] if each["workers"] <= most]
    folder = record.with_name(f"{record.name}-first-{most}")
    folder.mkdir(exist_ok=True)
    (folder / "scale.json").write_text(json.dumps(found))
    return folder


def compare(request: Request, whole: Measured, about: dict[str, Any]) -> dict[str, Any]:
    """Every number of workers that was not known on this link: predicted by `paceline plan`, measured, error."""
    unknown = {point.workers: point for point in whole.points if point.workers > about["known"]}
    plan = make_plan(replace(request, workers=",".join(map(str, unknown))))
    rows = []
    for row in plan.rows:
        point = unknown[row["workers"]]
        rows.append(
            {
                "workers": point.workers,
                **{
                    name: round(row[key], 2) for name, key in (("predicted", "samples_per_s"), ("low", "low"), ("high", "high"))
                },
                "measured": round(point.samples_per_s, 2),
                "measured_spread": round(point.spread, 4),
                "error": round(row["samples_per_s"] / point.samples_per_s - 1, 4),
                "predicted_parts_s": {name: round(part, 6) for name, part in row["components_s"].items()},
                "measured_parts_s": {name: round(part, 6) for name, part in point.components_s.items()},
            }
        )
    factor = None if plan.model.interference is None else round(float(plan.model.interference[0]), 4)
    wire = plan.model.cluster.intra or plan.model.cluster.inter
    assert wire is not None
    link = {"latency_us": wire.latency_s.typical * 1e6, "bandwidth_GBps": wire.bytes_per_s.typical / 1e9}
    return {**about, "cores": request.cores or "as measured", "assumed_link": link, "interference": factor, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown, for docs/plan.md."""
    heads = ("task", "link", "predicted from", "workers", "predicted (low to high)", "measured", "error")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for case in result["cases"]:
        basis = "1 and 2 workers on it" if case["how"] == "fitted" else "1 and 2 workers on loopback, the nominal rate"
        for row in case["rows"]:
            predicted = f"{row['predicted']:,.0f} ({row['low']:,.0f} to {row['high']:,.0f})"
            cells = [case["task"], WORDS[case["link"]], basis, str(row["workers"]), predicted, f"{row['measured']:,.0f}"]
            lines.append(f"| {' | '.join(cells)} | {row['error']:+.1%} |")
    return "\n".join([*lines, "", summary(result)])


def summary(result: dict[str, Any]) -> str:
    """The errors in one sentence."""
    rows = [row for case in result["cases"] for row in case["rows"]]
    errors = [abs(row["error"]) for row in rows]
    held = sum(row["low"] <= row["measured"] <= row["high"] for row in rows)
    within = sum(error <= 0.1 for error in errors)
    return (
        f"Of {len(errors)} predictions {within} are within 10%; the median error is {statistics.median(errors):.1%}, the"
        f" largest {max(errors):.1%}; {held} measurements lie between low and high."
    )


@contextmanager
def nodes_on_a_bridge(count: int, rate: str, burst: str) -> Iterator[list[Node]]:
    """`count` namespaces on a bridge in a separate namespace, each cable shaped at both ends; removed at the end."""
    missing = (["root"] if os.geteuid() else []) + [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"shaped links need {' and '.join(missing)}: use --cases loopback to skip them")
    hub = f"pl-hub-{os.getpid()}"
    nodes = [Node(f"pl-{os.getpid()}-{i}", f"192.168.78.{i + 1}") for i in range(count)]
    try:
        for name in (hub, *(node.name for node in nodes)):
            _do("ip", "netns", "add", name)
            _do("ip", "-n", name, "link", "set", "lo", "up")
        _do("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", hub, "link", "set", "bridge", "up")
        for i, node in enumerate(nodes):
            _do("ip", "link", "add", "cable", "netns", node.name, "type", "veth", "peer", "name", f"port{i}", "netns", hub)
            _do("ip", "-n", node.name, "address", "add", f"{node.address}/24", "dev", "cable")
            _do("ip", "-n", hub, "link", "set", f"port{i}", "master", "bridge")
            for where, end in ((node.name, "cable"), (hub, f"port{i}")):
                _do("ip", "-n", where, "link", "set", end, "up")
                shape = ["tbf", "rate", rate, "burst", burst, "latency", "50ms"]
                _do("tc", "-n", where, "qdisc", "add", "dev", end, "root", *shape)
        yield nodes
    finally:
        for name in (hub, *(node.name for node in nodes)):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
