"""Train and look at the models of docs/gallery.md: their surfaces, sharpness and paths, into studies/surfaces/.

    python tools/surfaces.py [--only STEP ...] [--out studies/surfaces] [--tiny]

Every step is a list of `paceline` commands, run in this process one after the other, so that the compiler's work is paid for
once. The results keep their commands. On one H200 all steps take about 20 minutes; `--tiny` tries them on a CPU, with small
data and a small net. `make gallery` draws what is committed, without training.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline import cli
from paceline.files import read_json, write_json

ROOT = Path(__file__).parents[1]
RUNS = Path("runs")
ARMS = {"small": "128", "small-untuned": "128, lr 0.01", "large": "4096, sqrt, warm-up", "large-untuned": "4096, same lr"}
"""The four models of the question whether large batches find sharp minima: their arms in studies/gap.toml."""
NETS = {f"resnet-{depth}{'' if skip else '-plain'}": (depth, skip) for depth in (20, 56) for skip in (True, False)}
PATHS = {
    "sgd": ("--optimizer", "sgd", "--momentum", "0", "--no-nesterov", "--base-lr", "0.1"),
    "momentum": ("--optimizer", "sgd", "--momentum", "0.9", "--no-nesterov", "--base-lr", "0.02"),
    "novograd": ("--optimizer", "novograd", "--base-lr", "0.01", "--weight-decay", "0.001"),
}
"""Three optimizers from the same start, for the plane of their paths."""
LAYERS = {"sgd": ("--optimizer", "sgd", "--base-lr", "0.1"), "lars": ("--optimizer", "lars", "--base-lr", "1.5")}
"""Two optimizers, of which the second gives all convolutions the same ratio."""


class Session:
    """The commands of all steps, and what is kept of them."""

    def __init__(self, out: Path, tiny: bool) -> None:
        self.out, self.tiny = out, tiny
        self.task = "fashion-mnist-mini" if tiny else "fashion-mnist"
        self.points = "5" if tiny else "51"
        out.mkdir(parents=True, exist_ok=True)

    def run(self, *argv: str) -> float:
        """Run a command; returns its seconds."""
        print("$ paceline " + " ".join(argv), flush=True)
        begin = time.perf_counter()
        code = cli.run(argv)
        took = time.perf_counter() - begin
        print(f"  exit code {code} after {took:.1f} s", flush=True)
        if code:
            raise SystemExit(f"paceline {' '.join(argv)} failed")
        return took

    def train(self, name: str, model: str, *more: str) -> None:
        """Train a net on unaugmented data, unless its record exists."""
        if (RUNS / name / "model.safetensors").exists():
            return
        small = ("--epochs", "1", "--max-steps", "6") if self.tiny else ()
        shared = ("--no-flip", "--precision", "fp32" if self.tiny else "bf16", "--checkpoint-every", "0")
        model = "resnet:depth=8" + (",skip=false" if "skip=false" in model else "") if self.tiny else model
        self.run("train", self.task, "--name", name, "--model", model, *shared, *more, *small)

    def keep(self, source: Path, name: str, **about: Any) -> None:
        """Keep a result, without the machine's name and the command that was used here."""
        found = read_json(source)
        hidden = ("machine", "command", "git", "openmp", "system")
        about["environment"] = {key: value for key, value in found.pop("environment", {}).items() if key not in hidden}
        write_json(self.out / f"{name}.json", {**about, **found}, indent=0)


def gap(session: Session) -> None:
    """What closes the gap: the study, and every run's losses in evaluation mode on all its training and validation data."""
    if session.tiny:
        session.run("study", str(ROOT / "studies" / "gap.toml"), "--mini", "--per-device", "2")
    else:
        out = session.out.parent / "gap.json"
        session.run("study", str(ROOT / "studies" / "gap.toml"), "--per-device", "4", "--out", str(out))
    rows = []
    for arm, seed, record in records(session):
        found = {"arm": arm, "seed": seed}
        for data in ("train", "validation"):
            print(f"evaluating {record.name} on {data}", flush=True)
            found |= {f"{data}_{name}": value for name, value in evaluate(record, data).items()}
        rows.append(found)
    write_json(session.out / "gap-losses.json", {"command": "paceline evaluate RECORD --data train|validation", "rows": rows})


def sharp(session: Session) -> None:
    """Sharpness of four arms of the study, and the lines and planes of their first seeds."""
    found = {(arm, seed): record for arm, seed, record in records(session)}
    named = {(name, seed): found.get((arm, seed)) for name, arm in ARMS.items() for seed in range(3)}
    for (name, seed), record in named.items():
        if record is not None:
            samples = "200" if session.tiny else "2000"
            session.run("sharpness", str(record), "--samples", samples)
            session.keep(record / "sharpness.json", f"sharpness-{name}-{seed}", command=f"paceline sharpness {name}")
    small, reach = named["small", 0], ("--points", session.points, "--workers", "1")
    for name in ("large", "large-untuned"):
        other = named[name, 0]
        if small is not None and other is not None:
            samples = "200" if session.tiny else "5000"
            session.run("landscape", str(small), "--to", str(other), "--samples", samples, *reach)
            file = next((small / "landscape").glob(f"between-{other.name[:20]}*.json"), None) or newest(small / "landscape")
            session.keep(file, f"between-{name}", command=f"paceline landscape small --to {name} --points 51 --samples 5000")
    for name in ARMS:
        record = named[name, 0]
        if record is not None:
            session.run("landscape", str(record), *reach)
            session.keep(
                record / "landscape" / "plane-0.json", f"plane-{name}", command=f"paceline landscape {name} --points 51"
            )


def skip(session: Session) -> None:
    """Residual nets with and without skip connections at two depths."""
    for name, (depth, has) in NETS.items():
        model = f"resnet:depth={depth}" + ("" if has else ",skip=false")
        session.train(name, model, "--epochs", "10", "--schedule", "cosine", "--base-lr", "0.1", "--fast", "auto")
        session.run("landscape", name, "--points", session.points, "--workers", "1")
        session.keep(
            RUNS / name / "landscape" / "plane-0.json",
            f"plane-{name}",
            command=f"paceline landscape {name} --points 51",
            train=f"paceline train fashion-mnist --model {model} --epochs 10 --schedule cosine --base-lr 0.1 --no-flip",
            result=read_json(RUNS / name / "result.json")["metrics"],
        )


def paths(session: Session) -> None:
    """The paths of three optimizers from the same start, on one plane."""
    for name, options in PATHS.items():
        shared = ("--epochs", "5", "--schedule", "cosine", "--snapshots", "6" if session.tiny else "40", "--fast", "auto")
        session.train(name, "resnet:depth=20", *options, *shared)
    first, *others = PATHS
    session.run("landscape", first, "--shape", "path", "--also", ",".join(others), "--points", session.points, "--workers", "1")
    session.keep(
        RUNS / first / "landscape" / "path.json",
        "path",
        command=f"paceline landscape {first} --shape path --also {','.join(others)} --points 51",
        train={name: " ".join(options) for name, options in PATHS.items()},
        result={name: read_json(RUNS / name / "result.json")["metrics"] for name in PATHS},
    )


def layers(session: Session) -> None:
    """Update-to-weight ratios of all layers under SGD and LARS: small data, also on a CPU."""
    found, commands = {}, {}
    for name, options in LAYERS.items():
        record = RUNS / f"layers-{name}"
        argv = ("train", "fashion-mnist-mini", "--model", "resnet:depth=14", *options)
        argv += ("--epochs", "3", "--watch-layers", "4", "--checkpoint-every", "0", "--fast", "off", "--precision", "fp32")
        commands[name] = "paceline " + " ".join(argv)
        if not (record / "model.safetensors").exists():
            session.run(*argv, "--name", record.name, *(("--max-steps", "6") if session.tiny else ()))
        rows = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
        found[name] = {
            "rows": [row for row in rows if row.get("kind") == "layers"],
            "result": read_json(record / "result.json")["metrics"],
        }
    write_json(session.out / "layers.json", {"commands": commands, "runs": found}, indent=0)


STEPS: dict[str, Callable[[Session], None]] = {
    "gap": gap,
    "skip": skip,
    "paths": paths,
    "sharp": sharp,
    "layers": layers,
}


def records(session: Session) -> list[tuple[str, int, Path]]:
    """Arm, seed and record of the study's runs that ended well."""
    folder = RUNS / ("study-gap-mini" if session.tiny else "study-gap")
    folder = folder if folder.exists() else RUNS / "gap"
    found = []
    for file in sorted(folder.glob("*.run.json")):
        about, record = read_json(file), folder / file.name.removesuffix(".run.json")
        if (record / "model.safetensors").exists():
            found.append((about["arm"], about["seed"], record))
    return found


def evaluate(record: Path, data: str) -> dict[str, float]:
    """Loss and accuracy of a record's model."""
    from paceline.training.after import Request, in_world
    from paceline.training.after import evaluate as measure

    request = Request(record=str(record), data=data if data == "train" else "")
    found = in_world(request, [], lambda here: measure(request, here))
    assert found is not None
    return {name: float(value) for name, value in found["metrics"].items()}


def newest(folder: Path) -> Path:
    """The file that was written last."""
    return max(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=STEPS, help="only this step; repeatable")
    parser.add_argument("--out", type=Path, default=ROOT / "studies" / "surfaces")
    parser.add_argument("--tiny", action="store_true", help="try the commands: small data, small net, few points")
    args = parser.parse_args(argv)
    session = Session(args.out.resolve(), args.tiny)
    failed = []
    for name in args.only or STEPS:
        begin = time.perf_counter()
        try:
            STEPS[name](session)
        except SystemExit as error:  # the other steps do not depend on it
            failed.append(f"{name}: {error}")
        print(f"== {name}: {time.perf_counter() - begin:.1f} s", flush=True)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
