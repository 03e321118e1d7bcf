"""`paceline sharpness RECORD`: its arguments and its table. The measures are in `sharpness.py`.

Nothing at the top of this file imports torch.
"""

import argparse
import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from paceline.config import Config
from paceline.errors import Stopped, UsageError, unknown
from paceline.evaluate import WEIGHTS, is_main, start_stages, to_flags
from paceline.files import finite
from paceline.output import make_table, plural, say, stages
from paceline.records import find_record

MEASURES = ("keskar", "sam", "hessian")
_CONVERGED = 0.01
"""Of an eigenvalue: it counts as converged if its residual is smaller."""
_BOUNDS = {
    "samples": (0, 10**9),
    "top": (1, 100),
    "vectors": (1, 10_000),
    "lanczos_steps": (2, 1000),
    "workers": (1, 10_000),
    "seed": (0, 2**63 - 1),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the record, the samples, the measures and the workers."""
    parser.add_argument("record", metavar="RECORD", help="a record of paceline train, by its folder or name")
    parser.add_argument(
        "--samples", default=1000, type=int, metavar="N", help="training samples to look at; 0: all of them [1000]"
    )
    parser.add_argument("--weights", default="last", choices=WEIGHTS, help="weights of the last or of the best epoch [last]")
    parser.add_argument(
        "--measures", default="", metavar="LIST", help=f"which of {','.join(MEASURES)}, separated by commas [all]"
    )
    parser.add_argument("--top", default=3, type=int, metavar="K", help="largest eigenvalues of the Hessian to find [3]")
    parser.add_argument(
        "--vectors",
        default=20,
        type=int,
        metavar="N",
        help="random vectors for the Hessian's trace; the first 4 are for its eigenvalues, too [20]",
    )
    parser.add_argument(
        "--lanczos-steps", default=40, type=int, metavar="N", help="Hessian-vector products for each of these 4 vectors [40]"
    )
    parser.add_argument("--seed", default=0, type=int, metavar="N", help="seed of the samples and of all random vectors [0]")
    parser.add_argument("--task", default="", metavar="TASK", help="the task, if it is no longer where the record says")
    parser.add_argument("--workers", type=int, metavar="N", help="workers to start on this node [1]")
    backends = ("auto", "nccl", "gloo", "mpi")
    parser.add_argument("--backend", default="auto", choices=backends, help="how workers communicate [auto]")
    parser.add_argument("--runs-dir", default=Config.runs_dir, metavar="DIR", help="folder of the records [runs]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: dict[str, Any]) -> int:
    """Measure, write sharpness.json into the record, and print a table."""
    as_json = options.pop("json")
    flags = to_flags({name: str(value) if isinstance(value, int) else value for name, value in options.items()})  # 0 is a value
    measures = _check(options)
    find_record(options["record"], options["runs_dir"])  # report a mistake before torch is loaded
    if not as_json:  # its output is JSON and nothing else
        start_stages()
    try:
        from paceline.sharpness.sharpness import Options, measure
        from paceline.training.after import Request, in_world

        chosen = Options(
            measures=measures,
            samples=options["samples"],
            top=options["top"],
            vectors=options["vectors"],
            steps=options["lanczos_steps"],
            seed=options["seed"],
        )
        named = ("record", "weights", "task", "workers", "backend", "runs_dir")
        request = Request(sets=("train",), precision="fp32", **{name: options[name] for name in named})
        command = ["sharpness", *flags, *(["--json"] if as_json else [])]
        found = in_world(request, command, lambda here: measure(request, chosen, here))
    except (KeyboardInterrupt, Stopped) as stop:
        why = "Ctrl-C" if isinstance(stop, KeyboardInterrupt) or stop.exit_code == 130 else "a signal"
        raise Stopped(f"stopped by {why}; finished measures are kept: the same command continues", why) from None
    finally:
        stages.stop()
    if found is not None and is_main():
        path = find_record(options["record"], options["runs_dir"]) / "sharpness.json"
        new = found.pop("new")
        say(json.dumps(finite(found), indent=2) if as_json else describe(found))
        if not as_json:
            say(f"written to {path}" if new else f"measured before: delete {path} to measure again")
    return 0


def describe(found: Mapping[str, Any]) -> str:
    """The table, with what each number means."""
    rows = [
        [f"Keskar, {each['space']}, epsilon {each['epsilon']:g}", _KESKAR[each["space"]], _percent(each["sharpness"])]
        for each in found.get("keskar", ())
    ]
    for name, (title, meaning) in _RISES.items():
        if name in found:
            rows.append([f"{title}, rho {found[name]['rho']:g}", meaning, _number(found[name]["rise"])])
    rows += _describe_hessian(found["hessian"]) if "hessian" in found else []
    about = (
        f"{found['weights']} weights on {plural(found['samples'], 'training sample')}, loss {_number(found['loss'])};"
        f" {plural(found['workers'], 'worker')}, {found['time_s']:.1f} s"
    )
    return "\n".join([make_table(("measure", "meaning", "value"), rows, left=2), *found.get("notes", {}).values(), about])


_KESKAR = {
    "full": "largest rise of the loss in a small box, as a share of 1 + loss",
    "subspace": "the same along 100 random directions",
}
_RISES = {
    "sam": ("SAM", "rise of the loss after one step up the gradient"),
    "adaptive": ("adaptive SAM", "the same in units of each weight: scale-invariant"),
}


def _describe_hessian(found: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for number, (value, residual) in enumerate(zip(found["top"], found["residuals"], strict=True), start=1):
        meaning = "curvature in the sharpest direction" if number == 1 else "in the next sharpest"
        if not abs(residual) <= _CONVERGED * abs(value):
            meaning += f"; not converged: +-{_number(residual)}"
        rows.append([f"Hessian, eigenvalue {number}", meaning, _number(value)])
    error = "" if found["trace_error"] is None else f", +-{_number(found['trace_error'])}"
    rows.append(["Hessian, trace", f"sum of all curvatures{error}", _number(found["trace"])])
    share = _percent(100 * found["density"]["near_zero"])
    return [*rows, ["Hessian, flat share", "eigenvalues below 1% of the largest", share]]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "not finite" if value is None else f"{value:,.1f}%" if value >= 10 else f"{value:.3g}%"


def _check(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The measures that are asked for. Raises a UsageError for a mistake in the options."""
    for name, (least, most) in _BOUNDS.items():
        value = options[name]
        if value is not None and not least <= value <= most:
            raise UsageError(f"--{name.replace('_', '-')} is {value}: it must be from {least} to {most:,}")
    if options["top"] > options["lanczos_steps"]:
        raise UsageError(
            f"--top is {options['top']} and --lanczos-steps {options['lanczos_steps']}: N steps find at most N eigenvalues"
        )
    asked = tuple(filter(None, (each.strip() for each in options["measures"].split(","))))
    for each in asked:
        if each not in MEASURES:
            raise unknown("measure", each, MEASURES)
    measures = tuple(each for each in MEASURES if each in (asked or MEASURES))
    if "keskar" in measures and find_spec("scipy") is None:
        raise UsageError(
            "Keskar's sharpness needs scipy: pip install 'paceline[curvature]', or leave it out with --measures sam,hessian"
        )
    return measures
