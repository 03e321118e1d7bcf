"""Paceline against its peers: the same training, written as each one's documentation says (bench/peers/).

    python bench/peers.py [--device cuda|cpu] [--model wide_resnet] [--part-batch 128 1024] [--workers 1 2] [--precision bf16]
        [--data fashion-mnist] [--epochs 3] [--rounds 3] [--arms plain,accelerate,lightning,composer,paceline]
        [--loaders N] [--compile-peers] [--paceline-flags "..."] [--python PATH] [--out bench/results/peers_cpu.json]

Every arm is a command in a new process. Arms take turns in every round, so a busy machine slows all of them. Model, data,
augmentation, batch per worker, optimizer, schedule and precision are the same; validation is not part of the times. Images/s
are those of every epoch except the first, by the arm's own clock around the epoch's training steps (for Paceline, from its
record). Start-up is from the start of the command to the end of the first step (for Paceline on a GPU, until the step is
captured, which takes longer). Memory on a GPU is the most that tensors used on one worker's GPU; on CPUs it is what all
processes of the command hold when the last epoch's training ends, with shared pages counted once. Lines are those of the script
that a user has to write, without comments, docstrings, blank lines and lines marked `# bench`. Model, data set and arguments
come from bench/peers/shared.py and do not count.

Peers load data with torch's DataLoader. The number of loader processes per worker is --loaders, or else 8 on a GPU, and on CPUs
the fastest of 0, 1 and 2 for each arm and case, found in a short trial. On CPUs each worker computes with one thread, in
addition to its loaders.
"""

import argparse
import ast
import io
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from measurement import children, spread, write
from paceline.data.fashion_mnist import SOURCES

FOLDER = Path(__file__).resolve().parent / "peers"
PREFIX = "PEERS-EVENT "  # as in peers/shared.py, which needs torch to import
REFERENCE_BATCH, BASE_LR = 128, 0.05  # peak lr grows with the global batch


@dataclass(frozen=True)
class Arm:
    """A peer: its name, the file that its user writes, and the module it needs."""

    title: str
    script: str
    module: str


ARMS = {
    "plain": Arm("plain DDP", "plain_ddp.py", "torch"),
    "accelerate": Arm("Accelerate", "accelerate_script.py", "accelerate"),
    "lightning": Arm("Lightning", "lightning_script.py", "lightning"),
    "composer": Arm("Composer", "composer_script.py", "composer"),
    "paceline": Arm("Paceline", "paceline_task.py", "paceline"),
}
RIVALS = ("accelerate", "lightning")


def main() -> int:
    """Measure, print and write the result; 1 if an arm failed."""
    args = parse()
    missing = {arm: why for arm in args.arms if (why := not_installed(args.python, ARMS[arm].module))}
    result: dict[str, Any] = {
        "what": "images/s, memory, start-up and lines of the same training with Paceline and with its peers",
        **{name: getattr(args, name) for name in ("device", "model", "precision", "data", "epochs", "rounds")},
        "compile_peers": args.compile_peers,
        "paceline_flags": args.paceline_flags,
        "versions": versions(args.python),
        "lines": {arm: count_lines((FOLDER / ARMS[arm].script).read_text()) for arm in args.arms},
        "cases": [],
    }
    for part_batch in args.part_batch:
        for workers in args.workers:
            result["cases"].append(measure(args, part_batch, workers, missing))
            write(args.out, result)  # keep what is done if the bench is cut short
    print(table(result))
    return any(
        isinstance(found, str) and found.startswith("failed") for case in result["cases"] for found in case["arms"].values()
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--model", default="wide_resnet")
    parser.add_argument("--part-batch", type=int, nargs="+", default=[128, 1024], help="samples per worker and step")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--data", choices=list(SOURCES), default="fashion-mnist")
    parser.add_argument("--epochs", type=int, default=3, help="at least 2: the first is left out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", default=",".join(ARMS), type=lambda text: text.split(","))
    parser.add_argument("--loaders", type=int, help="DataLoader processes per worker (default: 8 on a GPU, else by trial)")
    parser.add_argument("--compile-peers", action="store_true", help="torch.compile the peers' model")
    parser.add_argument("--paceline-flags", default="", help="added to Paceline's command")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs the arms")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "peers_cpu.json"))
    args = parser.parse_args()
    if unknown := set(args.arms) - set(ARMS):
        parser.error(f"--arms {', '.join(unknown)}: choose from {', '.join(ARMS)}")
    if args.epochs < 2:
        parser.error("--epochs: at least 2, because the first is left out")
    if args.device == "cuda" and max(args.workers) > (gpus := torch.cuda.device_count()):
        print(
            f"--workers: this machine has {gpus} GPU(s), and workers do not share one: larger numbers are skipped", flush=True
        )
        args.workers = [workers for workers in args.workers if workers <= gpus]
    return args


def measure(args: argparse.Namespace, part_batch: int, workers: int, missing: dict[str, str]) -> dict[str, Any]:
    """All rounds of all arms at one size."""
    here = [arm for arm in args.arms if arm not in missing]
    common = {
        **{name: getattr(args, name) for name in ("device", "model", "precision", "data", "epochs")},
        **{"part_batch": part_batch, "workers": workers, "peak_lr": BASE_LR * part_batch * workers / REFERENCE_BATCH},
    }
    arms: dict[str, Any] = {arm: f"not installed: {why}" for arm, why in missing.items()}
    rows: dict[str, list[dict[str, Any]]] = {arm: [] for arm in here}
    chosen: dict[str, dict[str, Any]] = {}
    for number in range(args.rounds):
        turn = number % len(here) if here else 0
        for arm in here[turn:] + here[:turn]:
            if arm in arms:
                continue
            try:
                if arm not in chosen:
                    chosen[arm] = choose_loaders(arm, common, args)
                rows[arm].append(row := run_twice(arm, {**common, "loaders": chosen[arm]["loaders"]}, args))
            except RuntimeError as error:
                print(f"{arm}: {error}", file=sys.stderr, flush=True)
                arms[arm] = f"failed: {str(error).splitlines()[0]}"
                continue
            facts = [f"{row['images_per_s']:,.0f} images/s", f"accuracy {row['accuracy']:.3f}"]
            print(f"part batch {part_batch}, {workers} worker(s), round {number + 1}/{args.rounds}, {arm}: {', '.join(facts)}")
    done = {arm: rows[arm] for arm in here if arm not in arms}
    rivals = [arm for arm in RIVALS if arm in done]
    best = max(rivals, key=lambda arm: statistics.median(row["images_per_s"] for row in done[arm]), default=None)
    for arm in done:
        for row, other in zip(done[arm], done[best] if best else (), strict=False):
            row["ratio"] = [speed / other["images_per_s"] for speed in row["images_per_s_by_epoch"]]
        arms[arm] = {**chosen[arm], **summarize(done[arm]), "rows": done[arm]}
    return {"part_batch": part_batch, "workers": workers, "ratio_to": best, "arms": {arm: arms[arm] for arm in args.arms}}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and spread: of speeds over all epochs of all rounds, of everything else over rounds."""
    epochs = {
        "images_per_s": [speed for row in rows for speed in row["images_per_s_by_epoch"]],
        "ratio": [ratio for row in rows for ratio in row.get("ratio", ())],
    }
    rounds = {name: [row[name] for row in rows] for name in ("memory_mb", "start_up_s", "accuracy")}
    return {name: spread(values) for name, values in (epochs | rounds).items() if values and None not in values}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown, for docs/speed.md."""
    lines = [
        "| samples per worker and step | workers | trained with | images/s | ratio to the faster of Lightning and Accelerate"
        " | memory | start-up | lines | accuracy |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        for arm, found in case["arms"].items():
            row = [str(case["part_batch"]), str(case["workers"]), ARMS[arm].title]
            if isinstance(found, str):
                row += [found, "", "", "", str(result["lines"][arm]), ""]
            else:
                row += [
                    _spread(found, "images_per_s", ",.0f"),
                    _spread(found, "ratio", ".2f"),
                    _median(found, "memory_mb", ",.0f MB"),
                ]
                row += [_median(found, "start_up_s", ".1f s"), str(result["lines"][arm]), _median(found, "accuracy", ".3f")]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _median(found: dict[str, Any], name: str, form: str) -> str:
    digits, _, unit = form.partition(" ")
    return f"{found[name]['median']:{digits}} {unit}".rstrip() if name in found else ""


def _spread(found: dict[str, Any], name: str, digits: str) -> str:
    if name not in found:
        return ""
    median, low, high = (format(found[name][which], digits) for which in ("median", "min", "max"))
    return f"{median} ({low} to {high})"


def choose_loaders(arm: str, common: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The number of DataLoader processes per worker of this arm, and the trial that decided it."""
    if arm == "paceline":
        return {"loaders": 0}  # it keeps the data on the device
    if args.loaders is not None or args.device == "cuda":
        return {"loaders": 8 if args.loaders is None else args.loaders}
    trial = {n: run(arm, {**common, "epochs": 2, "loaders": n}, args)["images_per_s"] for n in (0, 1, 2)}
    best = max(trial, key=lambda n: trial[n])
    tried = ", ".join(f"{n}: {speed:,.0f}" for n, speed in trial.items())
    print(f"{arm}, {common['workers']} worker(s): images/s by DataLoader processes {tried}; {best} chosen", flush=True)
    return {"loaders": best, "loaders_trial_images_per_s": {str(n): round(speed) for n, speed in trial.items()}}


def run_twice(arm: str, settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """One run, repeated if it crashed: a crash says nothing about speed. The row says that it happened."""
    try:
        return run(arm, settings, args)
    except RuntimeError as error:
        return {**run(arm, settings, args), "crashed_before": str(error).splitlines()[0]}


def run(arm: str, settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """One run of one arm; a RuntimeError with the end of its output if it fails."""
    settings = {**settings, "compile": args.compile_peers and arm != "paceline"}
    with tempfile.TemporaryDirectory() as folder:
        record, errors = Path(folder) / "record", Path(folder) / "stderr"
        own = ["--runs-dir", folder, "--name", record.name, *shlex.split(args.paceline_flags)]
        command = [*launch(arm, settings, args.python), *(own if arm == "paceline" else [])]
        env = {**os.environ, **QUIET, "PEERS": json.dumps(settings)}
        env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if settings["device"] == "cpu" else {}
        events: list[dict[str, Any]] = []
        memory_mb, started, said = None, time.time(), ""
        with (
            errors.open("w") as log,
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True) as process,
        ):
            assert process.stdout
            for line in process.stdout:
                said = line.strip() or said
                if "the step is captured" in line:  # Paceline's first step: what came before were trials
                    events.append({"event": "first step", "time": time.time()})
                if event := line.partition(PREFIX)[2]:
                    events.append(json.loads(event))
                    if (
                        events[-1]["event"] == "epoch"
                        and events[-1]["number"] == settings["epochs"]
                        and events[-1]["rank"] == 0
                    ):
                        memory_mb = events[-1]["gpu_mb"] or held_mb(process.pid)
        if process.returncode:
            complaint = errors.read_text().strip() or said
            raise RuntimeError(f"{complaint.splitlines()[-1]} (code {process.returncode})\n{complaint[-3000:]}")
        first = [event["time"] for event in events if event["event"] == "first step"]
        speeds, accuracy = read_record(record) if arm == "paceline" else read_events(events, settings)
    return {
        "images_per_s": statistics.median(speeds[1:]),
        "images_per_s_by_epoch": speeds[1:],
        "memory_mb": memory_mb,
        "start_up_s": max(first) - started if first else None,
        "accuracy": accuracy,
    }


QUIET = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


def launch(arm: str, settings: dict[str, Any], python: str) -> list[str]:
    """The command that each peer's documentation gives."""
    script, workers = str(FOLDER / ARMS[arm].script), settings["workers"]
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", script]
    if arm == "lightning":
        return [python, script]
    if arm == "composer":
        return [python, "-m", "composer.cli", "-n", str(workers), script]
    if arm == "paceline":
        flags = {name: settings[name] for name in ("workers", "epochs", "precision")} | {
            "reference-batch": settings["part_batch"]
        }
        return [python, "-m", "paceline", "train", script, *(f"--{name}={value}" for name, value in flags.items())]
    if arm == "accelerate" and (settings["device"] == "cuda" or workers == 1):  # it starts several CPU workers only under MPI
        where = ["--multi_gpu"] if workers > 1 else ["--cpu"] if settings["device"] == "cpu" else []
        precision = "bf16" if settings["precision"] == "bf16" else "no"
        flags = [f"--num_processes={workers}", "--num_machines=1", f"--mixed_precision={precision}", "--dynamo_backend=no"]
        return [python, "-m", "accelerate.commands.launch", *where, *flags, script]
    return torchrun


def read_events(events: list[dict[str, Any]], settings: dict[str, Any]) -> tuple[list[float], float]:
    """Images/s of each epoch, and the last accuracy."""
    epochs = [event for event in events if event["event"] == "epoch" and event["rank"] == 0]
    images = SOURCES[settings["data"]].train_size
    accuracies = [event["value"] for event in events if event["event"] == "accuracy"]
    return [(event["images"] or images) / event["time_s"] for event in epochs], accuracies[-1]


def read_record(record: Path) -> tuple[list[float], float]:
    """Images/s of each epoch, and the last accuracy, from Paceline's record."""
    rows = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    return [row["samples_per_s"] for row in epochs], epochs[-1]["val_accuracy"]


def held_mb(pid: int) -> float:
    """Memory of a command's processes, including launcher and loaders; shared pages count once."""
    total_kb = 0
    for each in (pid, *children(pid)):
        try:
            text = Path(f"/proc/{each}/smaps_rollup").read_text()
        except OSError:  # the process ended meanwhile
            continue
        total_kb += sum(int(kb) for kb in re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE))
    return total_kb * 1024 / 1e6


def not_installed(python: str, module: str) -> str:
    """Why this interpreter cannot import the module; "" if it can."""
    found = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    return found.stderr.strip().splitlines()[-1] if found.returncode else ""


def versions(python: str) -> dict[str, str]:
    """Versions of Python, torch and the peers that are installed."""
    code = (
        "import json, platform, importlib.metadata as m; have = {d.name.lower(): d.version for d in m.distributions()};"
        "names = ['torch', 'accelerate', 'lightning', 'mosaicml', 'paceline'];"
        "print(json.dumps({'python': platform.python_version(), **{n: have[n] for n in names if n in have}}))"
    )
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def count_lines(source: str) -> int:
    """Lines of code, without blank lines, comments, docstrings and lines that belong to the measurement."""
    idle = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines, measuring = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.string == "# bench":
            measuring.add(token.start[0])
        elif token.type not in idle:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines - measuring)


if __name__ == "__main__":
    sys.exit(main())
