#!/usr/bin/env python3
"""The course's training script on Paceline, with the same flags and the same printed fields (docs/course.md).

    python3 fashion_mnist.py --epochs 3 --num-gpus 1 --batch-size 128
    python3 fashion_mnist.py --num-gpus 4 --base-lr 0.08 --batch-size 256

As in the course, the batch size is per GPU, the learning rate is used as given, and warm-up moves once per epoch, starting at
base-lr / GPUs. Without GPUs it trains on that many CPU workers, with a small model unless you name one.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Translate the course's flags into Paceline's options and train; errors are one line."""
    _find_paceline()
    from paceline.errors import PacelineError

    try:
        run(sys.argv[1:])
    except PacelineError as error:
        print(f"fashion_mnist.py: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("fashion_mnist.py: interrupted", file=sys.stderr)
        return 130
    return 0


def run(argv: list[str]) -> None:
    """Choose model and data for this machine, print the choice, and train."""
    from paceline.data import fashion_mnist
    from paceline.data.verb import DownloadProgress
    from paceline.errors import DataError
    from paceline.output import plural
    from paceline.training.run import train

    args = _parse(argv)
    import torch

    data_dir = Path(args.data_dir) if args.data_dir else None
    task, model = "fashion-mnist", args.model or "course_wide_resnet"
    if not torch.cuda.is_available():
        small = "" if args.model else " with the small model cnn (--model course_wide_resnet for the course's own)"
        model = args.model or "cnn"
        print(f"no GPU here: training on {plural(args.num_gpus, 'CPU worker')}{small}", flush=True)
    try:
        with DownloadProgress() as progress:
            fashion_mnist.load(task, data_dir, progress)
    except DataError as error:
        if data_dir:
            raise
        print(
            f"the full Fashion-MNIST is not available, so this trains on the mini set that ships with Paceline: {error}",
            flush=True,
        )
        task = "fashion-mnist-mini"
    os.environ["PACELINE_EPOCH_LINE"] = "course"  # the six fields of the course's own script
    train(task, **_options(args, model))


def _options(args: argparse.Namespace, model: str) -> dict[str, Any]:
    world = args.num_gpus * args.num_nodes
    options = {
        "workers": args.num_gpus,
        "nodes": args.num_nodes,
        "node_id": args.node_id,
        "model": model,
        "pixels": "unit",
        "flip": False,
        "reference_batch": args.batch_size,
        "global_batch": args.batch_size * world,
        "base_lr": args.base_lr,
        "lr_rule": "none",
        "momentum": args.momentum,
        "nesterov": False,
        "weight_decay": 0.0,
        "schedule": "constant",
        "schedule_by": "epoch",
        "warmup_epochs": float(args.warmup_epochs) if args.num_gpus > 1 else 0.0,
        "warmup_from": 1 / args.num_gpus,
        "epochs": args.epochs,
        "target_accuracy": args.target_accuracy,
        "patience": args.patience if args.target_accuracy else 1,  # without a target there is nothing to count
        "seed": args.seed,
        "runs_dir": args.runs_dir,
    }
    return {**options, "data_dir": args.data_dir} if args.data_dir else options


def _parse(argv: list[str]) -> argparse.Namespace:
    from paceline.cli import Parser
    from paceline.errors import UsageError

    parser = Parser(description="Train a model on Fashion-MNIST on any number of GPUs.", allow_abbrev=False)
    parser.add_argument("--batch-size", type=int, default=32, help="batch per GPU [32]")
    parser.add_argument("--epochs", type=int, default=40, help="maximum number of epochs [40]")
    parser.add_argument("--base-lr", type=float, default=0.01, help="learning rate, used as given [0.01]")
    parser.add_argument(
        "--target-accuracy", type=float, default=0.85, help="stop when validation accuracy reaches this [0.85] ..."
    )
    parser.add_argument("--patience", type=int, default=2, help="... in this many epochs in a row [2]")
    parser.add_argument("--num-nodes", type=int, default=1, help="nodes [1]; node 0 is at $MASTER_ADDR:$MASTER_PORT")
    parser.add_argument("--node-id", type=int, default=0, help="which node this is [0]")
    parser.add_argument("--num-gpus", type=int, default=1, help="GPUs (or CPU workers) on this node [1]")
    parser.add_argument("--momentum", type=float, default=0.9, help="momentum of SGD [0.9]")
    parser.add_argument("--warmup-epochs", type=int, default=5, help="epochs of warm-up with more than one GPU [5]")
    parser.add_argument("--model", default="", help="any of Paceline's models [course_wide_resnet on GPUs, cnn on CPUs]")
    parser.add_argument("--data-dir", default="", help="folder with Fashion-MNIST")
    parser.add_argument("--runs-dir", default="runs", help="folder for the record [runs]")
    parser.add_argument("--seed", type=int, default=0, help="all randomness follows from it [0]")
    args, rest = parser.parse_known_args(argv)
    if rest:
        parser.refuse(rest[0])
    for name in ("batch_size", "num_nodes", "num_gpus"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be at least 1")
    return args


def _find_paceline() -> None:
    """If this Python has no Paceline, use the environment that `make setup` made."""
    try:
        import paceline  # noqa: F401
    except ImportError:
        python = Path(__file__).resolve().parent / ".venv" / "bin" / "python"
        if not python.exists() or os.environ.get("PACELINE_REEXEC"):
            sys.exit("fashion_mnist.py: Paceline is not installed here: run `make setup` in this folder first")
        os.environ["PACELINE_REEXEC"] = "1"
        os.execv(python, [str(python), *sys.argv])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of torch's backends can abort an interpreter that is shutting down
