"""Turn the study of growing batches into its committed files.

python tools/batch_growth.py search FOLDER    # a search, such as runs/study-growth_search -> studies/growth_search.json
python tools/batch_growth.py effects          # what each setting is worth, from studies/growth_search.json
python tools/batch_growth.py results FOLDER   # the study's runs, such as runs/study-growth, into studies/results/growth.json
python tools/batch_growth.py picture          # docs/img/growth.svg, from studies/results
"""

import argparse
import json
import math
import re
import statistics
import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
from paceline.files import read_json, write_json  # noqa: E402
from paceline.output import plural  # noqa: E402
from paceline.records import read_metrics  # noqa: E402
from paceline.study.results import final_values  # noqa: E402

SEARCH, RESULTS, PICTURE = ("studies/growth_search.json", "studies/results/growth.json", "docs/img/growth.svg")
BATCH = "studies/results/batch.json"
FACTORS = "factors "
_MACHINE = ("machine", "openmp")  # of the environment: not about the results
_NOTE = re.compile(r"CUDA graph|noise scale is")
_CAPTURED = re.compile(r"captured as a CUDA graph.* in ([\d.]+) s")


def pack_search(folder: Path) -> dict[str, Any]:
    """The runs of a search: options over the common ones, accuracy by epoch, times, and notes from their logs."""
    found = read_json(folder / "study.json")
    arms = {name: arm["options"] for name, arm in found["study"]["arms"].items()}
    first = next(iter(arms.values()))
    common = {key: value for key, value in first.items() if all(each.get(key) == value for each in arms.values())}
    done = [run for run in found["runs"] if run["status"] == "done"]
    return {
        "what": "Runs by which the recipes of studies/growth.toml were chosen; options over the common ones.",
        **{key: found["environment"][key] for key in ("when", "versions", "devices")},
        "command": _command(found["environment"]["command"]),
        "git": sorted({run["git"] for run in done if run["git"]}),
        "task": found["study"]["task"],
        "common": common,
        "n": len(done),
        "runs": [_pack_run(run, arms[run["arm"]], common, folder) for run in done],
    }


def _pack_run(run: dict[str, Any], options: dict[str, Any], common: dict[str, Any], folder: Path) -> dict[str, Any]:
    record = folder / Path(run["record"]).name
    log = record.with_name(f"{record.name}.log").read_text()
    notes = [line.strip() for line in log.splitlines() if _NOTE.search(line)]
    phases = [row for row in read_metrics(record) if row["kind"] == "phase"]
    captured = _CAPTURED.search(log)
    return {
        "arm": run["arm"],
        "seed": run["seed"],
        "options": {key: value for key, value in options.items() if common.get(key, ...) != value},
        "steps": run["steps"],
        "phases": [[round(row["epoch"], 4), row["global_batch"], row["virtual_workers"]] for row in phases],
        "accuracy": run.get("val_accuracy", []),
        "loss": run["metrics"].get("loss"),
        "train_time_s": round(run["train_time_s"], 3),
        "capture_s": float(captured[1]) if captured else None,
        "wall_s": run["wall_s"],
        "notes": notes,
    }


def _command(words: list[str]) -> list[str]:
    """A command without the folders it wrote to."""
    folders = [i for i, word in enumerate(words) if word in ("--runs-dir", "--out")]
    return [word for i, word in enumerate(words) if i not in folders and i - 1 not in folders]


def pack_results(folder: Path) -> dict[str, Any]:
    """The results of the study, without arms that have no run yet and without what is about the machine's folders."""
    found: dict[str, Any] = read_json(folder / "study.json")
    ended = {run["arm"] for run in found["runs"]}
    found["study"]["arms"] = {name: arm for name, arm in found["study"]["arms"].items() if name in ended}
    about = {key: value for key, value in found["environment"].items() if key not in _MACHINE}
    found["environment"] = {**about, "command": _command(about["command"])}
    found["runs"] = [{key: value for key, value in run.items() if key != "record"} for run in found["runs"]]
    return found


def merge_results(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new results, and the old runs that were not repeated. Raises SystemExit if an arm has other options now."""
    arms = {**old["study"]["arms"], **new["study"]["arms"]}
    for name in old["study"]["arms"].keys() & new["study"]["arms"].keys():
        if old["study"]["arms"][name]["options"] != new["study"]["arms"][name]["options"]:
            raise SystemExit(f"the arm {name!r} has other options than its earlier runs: give it another name")
    repeated = {(run["arm"], run["seed"]) for run in new["runs"]}
    kept = [run for run in old["runs"] if (run["arm"], run["seed"]) not in repeated]
    return {**new, "study": {**new["study"], "arms": arms}, "runs": [*kept, *new["runs"]]}


def effects(search: dict[str, Any]) -> list[tuple[str, Any, Any, float, float]]:
    """What each setting of the factorial runs is worth: its name, low and high value, the difference in accuracy (high - low)
    and the standard error of that, by least squares. Every seed has a mean of its own.
    """
    import numpy as np

    runs = [run for run in search["runs"] if run["arm"].startswith(FACTORS)]
    names = list(dict.fromkeys(key for run in runs for key in run["options"]))
    levels = {name: sorted({run["options"].get(name, search["common"].get(name)) for run in runs}) for name in names}
    levels = {name: values for name, values in levels.items() if len(values) == 2}
    if "schedule" in levels:
        levels["schedule"].reverse()  # linear is the usual one
    signs = [[1.0 if run["options"].get(n) == high else -1.0 for n, (_, high) in levels.items()] for run in runs]
    blocks = [[float(run["seed"] == seed) for seed in sorted({run["seed"] for run in runs})] for run in runs]
    table, accuracy = np.hstack([signs, blocks]), np.array([run["accuracy"][-1] for run in runs])
    solution, _, rank, _ = np.linalg.lstsq(table, accuracy, rcond=None)
    if rank < table.shape[1]:
        raise SystemExit(f"{len(runs)} factorial runs are too few to tell {len(levels)} settings apart: all 16 are needed")
    left = accuracy - table @ solution
    variance = float(left @ left) / max(1, len(runs) - table.shape[1])
    errors = np.sqrt(variance * np.diag(np.linalg.inv(table.T @ table)))
    found = zip(levels.items(), solution, errors, strict=False)  # what follows belongs to the seeds
    # Rounded, because the last bits of a solution differ between CPUs.
    return [
        (name, low, high, round(2 * float(value), 9), round(2 * float(error), 9)) for (name, (low, high)), value, error in found
    ]


def effects_table(search: dict[str, Any]) -> str:
    """The effects as a Markdown table, largest first."""
    lines = ["| setting | low | high | high against low, points |", "|---|---|---|---|"]
    for name, low, high, value, error in sorted(effects(search), key=lambda row: -abs(row[3])):
        lines.append(f"| `{name}` | {low} | {high} | {100 * value:+.2f} ± {100 * error:.2f} |")
    return "\n".join(lines)


def search_table(search: dict[str, Any]) -> str:
    """Every run of the search in one line."""
    lines = []
    for run in search["runs"]:
        took = f"capture {run['capture_s']} s, training {run['train_time_s']:.1f} s, {run['wall_s']:.1f} s in all"
        options = " ".join(f"{key}={value}" for key, value in run["options"].items())
        lines.append(f"{run['accuracy'][-1]:.4f}  {run['steps']:5} steps  {took}  {run['arm']}: {options}")
    return "\n".join(lines)


# --- the picture ---

_WIDTH, _HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 130, 64, 56
_INK, _FAINT, _GRAY = "#1f2933", "#d5dbe1", "#52606d"
_TICKS = (0.95, 0.94, 0.92, 0.9, 0.85, 0.8, 0.7, 0.6)
LINES = {"muon to": ("Muon, growing", "#1769aa"), "muon": ("Muon, constant", "#c2410c"), "sgd to": ("SGD, growing", "#2f855a")}
LINES["sgd"] = ("SGD, constant", "#6b46c1")
REFERENCES = {"muon 512": "Muon, constant 512", "sgd 128": "SGD, constant 128"}
BATCHES = (4096, 8192, 16384, 32768, 60000)


def points(growth: dict[str, Any], *others: dict[str, Any]) -> dict[str, list[tuple[int, float, int, int]]]:
    """For each line of the picture: largest batch, mean accuracy, steps, seeds. Constant batches may be from other results."""
    found: dict[str, list[tuple[int, float, int, int]]] = {}
    for line in LINES:
        for size in BATCHES:
            older = f"{line.replace('sgd', 'nesterov')} {size}"
            for results, arm in ((growth, f"{line} {size}"), *((each, older) for each in others)):
                values = final_values(results, arm)
                if values:
                    found.setdefault(line, []).append((size, statistics.mean(values), _steps(results, arm), len(values)))
                    break
    return found


def _steps(results: dict[str, Any], arm: str) -> int:
    return next(int(run["steps"]) for run in results["runs"] if run["arm"] == arm and run["steps"])


def draw(growth: dict[str, Any], *others: dict[str, Any]) -> str:
    """Accuracy against the largest batch. The vertical axis is logarithmic in the error, 1 - accuracy."""
    lines = points(growth, *others)
    marks = {name: statistics.mean(final_values(growth, name)) for name in REFERENCES if final_values(growth, name)}
    shown = [accuracy for line in lines.values() for _, accuracy, *_ in line] + list(marks.values())
    best, worst = max(shown) + 0.003, min(shown) - 0.02

    def x(size: float) -> float:
        return _LEFT + 20 + math.log(size / BATCHES[0]) / math.log(BATCHES[-1] / BATCHES[0]) * (_WIDTH - _LEFT - _RIGHT - 40)

    def y(accuracy: float) -> float:
        share = math.log((1 - accuracy) / (1 - best)) / math.log((1 - worst) / (1 - best))
        return _TOP + share * (_HEIGHT - _TOP - _BOTTOM)

    seeds = [n for line in lines.values() for *_, n in line]
    about = f"WRN-16-4, Fashion-MNIST, 10 epochs, mean of at least {plural(min(seeds), 'seed')}; numbers: steps"
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        ' font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 22, "Accuracy against the largest batch, and steps", size=16, weight=600),
        _text(_LEFT, 42, about, color=_GRAY),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, "largest global batch", anchor="middle"),
        f'<text transform="translate(18 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle" fill="{_INK}">'
        "accuracy (log of the error)</text>",
    ]
    for tick in (tick for tick in _TICKS if worst < tick < best):
        shapes.append(f'<path d="M{_LEFT} {y(tick):.1f}H{_WIDTH - _RIGHT}" stroke="{_FAINT}"/>')
        shapes.append(_text(_LEFT - 8, y(tick) + 4, f"{tick:g}", anchor="end"))
    shapes += [_text(x(size), _HEIGHT - _BOTTOM + 18, f"{size:,}", anchor="middle") for size in BATCHES]
    for name, accuracy in marks.items():
        dashed = f'stroke="{_GRAY}" stroke-width="1.6" stroke-dasharray="5 4"'
        shapes.append(f'<path d="M{_LEFT} {y(accuracy):.1f}H{_WIDTH - _RIGHT}" {dashed}/>')
        for down, words in ((-2, REFERENCES[name]), (10, f"{accuracy:.4f}, {_steps(growth, name):,} steps")):
            shapes.append(_text(_WIDTH - _RIGHT + 6, y(accuracy) + down, words, color=_GRAY, size=11))
    for number, (line, places) in enumerate(lines.items()):
        label, color = LINES[line]
        at = [(x(size), y(accuracy)) for size, accuracy, *_ in places]
        joined = " L".join(f"{a:.1f} {b:.1f}" for a, b in at)
        shapes.append(f'<path d="M{joined}" fill="none" stroke="{color}" stroke-width="2.2"/>')
        for (a, b), (_, _, steps, _) in zip(at, places, strict=True):
            shapes.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="5" fill="{color}"/>')
            down = -9 if line.endswith("to") else 17
            shapes.append(_text(a, b + down, str(steps), color=color, anchor="middle", size=11))
        shapes.append(_text(_LEFT + 12, _HEIGHT - _BOTTOM - 70 + 18 * number, label, color=color, weight=600))
    return "\n".join([*shapes, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, color: str = _INK, anchor: str = "start", size: int = 13, weight: int = 400) -> str:
    halo = 'paint-order="stroke" stroke="#fff" stroke-width="3"'  # keeps text readable where it crosses a line
    about = f'fill="{color}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" {halo}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {about}>{escape(text)}</text>'


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "effects", "results", "picture"))
    parser.add_argument("folder", nargs="?", type=Path)
    args = parser.parse_args()
    if args.what in ("search", "results") and args.folder is None:
        parser.error(f"{args.what} needs the study's folder")
    if args.what == "search":
        packed = pack_search(args.folder)
        write_json(ROOT / SEARCH, packed, indent=1)
        print(search_table(packed))
    elif args.what == "results":
        write_json(ROOT / RESULTS, merge_results(json.loads((ROOT / RESULTS).read_text()), pack_results(args.folder)), indent=1)
    elif args.what == "effects":
        print(effects_table(json.loads((ROOT / SEARCH).read_text())))
    else:
        growth, batch = (json.loads((ROOT / path).read_text()) for path in (RESULTS, BATCH))
        (ROOT / PICTURE).write_text(draw(growth, batch))


if __name__ == "__main__":
    main()
