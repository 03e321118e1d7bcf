"""The time of a growing run on many workers, predicted from this machine, against a small batch on one worker, measured here.

    python bench/plan_growth.py [--rounds 3] [--recipe batch-16384] [--cluster dgx-h100] [--workers 1,8,16,32,64]

Four steps, each as a user would take it: `paceline train` with SGD at batch 128 (the arm "sgd 128" of studies/growth.toml),
`--rounds` times; `paceline train` with the recipe's model and optimizer on one worker, at batches from 2,048 down to 16, for
the times of a step; `paceline plan` with the recipe's schedule; the recipe itself on one worker, once for each way to cut its
steps into parts. For a trial on a CPU add `--task fashion-mnist-mini --model cnn --rounds 1`.
"""

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from measurement import spread, write
from paceline.files import read_json
from paceline.records import read_result
from paceline.toml import read_recipe

ROOT = Path(__file__).parents[1]
BATCHES = (2048, 1024, 512, 256, 128, 64, 32, 16)
"""Of the calibration: the largest first, so that `--fast auto` takes the run for a short one."""

CUTS = {  # of batch-16384
    "64 parts, 16 at once": ["--virtual-workers", "64", "--smallest-part", "16", "--parts-at-once", "16"],
    "64 parts, all at once": ["--virtual-workers", "64", "--smallest-part", "16", "--parts-at-once", "0"],
    "8 parts, in turn": ["--virtual-workers", "8", "--smallest-part", "2048", "--parts-at-once", "1"],
}


def main() -> None:
    """Measure, predict and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="fashion-mnist")
    parser.add_argument("--model", default="wide_resnet")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recipe", default="batch-16384")
    parser.add_argument("--cluster", default="dgx-h100")
    parser.add_argument("--workers", default="1,8,16,32,64")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "plan_growth.json"))
    args = parser.parse_args()
    recipe, most = read_recipe(args.recipe), max(map(int, args.workers.split(",")))
    schedule, epochs = recipe["batch_schedule"], str(recipe["epochs"])
    common = ["--model", args.model, "--precision", "auto", "--checkpoint-every", "0", "--workers", "1"]
    with tempfile.TemporaryDirectory() as folder:
        study = tomllib.loads((ROOT / "studies" / "growth.toml").read_text())
        reference = save(folder, "reference", {**study["options"], **study["arms"]["sgd 128"]})
        times = []
        for number in range(args.rounds):
            name = f"sgd-128-{number}"
            paceline(folder, "train", args.task, "--recipe", reference, "--epochs", epochs, "--name", name, *common)
            times.append(read_result(Path(folder, "runs", name))["train_time_s"])
            print(f"{name}: {times[-1]:.2f} s", flush=True)
        middle = sorted(range(args.rounds), key=times.__getitem__)[args.rounds // 2]
        paceline(folder, "train", args.task, "--name", "calibration", *calibration(folder, recipe), *common)
        plan = ["plan", "calibration", "--cluster", args.cluster, "--workers", args.workers, "--against", f"sgd-128-{middle}"]
        plan += ["--batch-schedule", schedule, "--virtual-workers", str(most), "--smallest-part", str(recipe["smallest_part"])]
        said = paceline(folder, *plan, "--epochs", epochs, "--json", "plan.json")
        print(said)
        result = {
            "what": f"predicted time of {args.recipe} on {args.cluster}, against SGD at batch 128 on one worker",
            "reference": {"what": "seconds of training", "n": len(times), **spread(times), "values": times},
            "plan": read_json(Path(folder, "plan.json")),
            "one_worker": {"what": f"{args.recipe} on one worker, one run each", "runs": cut(folder, args, common)},
        }
    write(args.out, result)


def calibration(folder: str, recipe: dict[str, Any]) -> list[str]:
    """The flags of a run that measures steps of each batch: one part, two epochs each, a learning rate that cannot diverge."""
    schedule = {str(2 * place): batch for place, batch in enumerate(BATCHES)}
    parts = {"batch_schedule": schedule, "global_batch": BATCHES[0], "virtual_workers": 1, "base_lr": 0.001, "rest_lr": 0.001}
    return ["--recipe", save(folder, "calibration", {**recipe, **parts}), "--epochs", str(2 * len(BATCHES)), "--profile"]


def cut(folder: str, args: argparse.Namespace, common: list[str]) -> dict[str, Any]:
    """The recipe on one worker with many small parts, some or all at once, and with few large ones."""
    found = {}
    for name, flags in CUTS.items():
        run = name.replace(",", "").replace(" ", "-")
        paceline(folder, "train", args.task, "--recipe", args.recipe, "--name", run, *flags, *common)
        result = read_result(Path(folder, "runs", run))
        found[name] = {"flags": flags, "train_time_s": result["train_time_s"], "accuracy": result["metrics"]["accuracy"]}
        print(f"{name}: {found[name]['train_time_s']:.2f} s", flush=True)
    return found


def save(folder: str, name: str, options: dict[str, Any]) -> str:
    """A recipe file with these options."""
    path = Path(folder, f"{name}.toml")
    path.write_text(tomli_w.dumps(options))
    return str(path)


def paceline(folder: str, *words: str) -> str:
    """What a command prints. Raises if it fails."""
    done = subprocess.run([sys.executable, "-m", "paceline", *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"paceline {' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
