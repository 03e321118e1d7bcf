"""Print the tables of docs/optimizers.md, from studies/results/*.json and bench/results/optimizers.json.

python tools/study_tables.py
"""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]
from batch_growth import effects_table  # noqa: E402
from paceline.optim import OPTIMIZERS  # noqa: E402
from paceline.status import Status  # noqa: E402
from paceline.study.results import compare_arm, difference_words, final_values  # noqa: E402

BATCHES = (128, 512, 1024, 4096, 8192, 16384)
REFERENCES = ("muon 512", "sgd 128")
HEADLINE = (8192, 16384, 32768)
"""The largest batches that README shows."""
GROWN = (("muon", 4096), ("muon", 8192), ("muon", 16384), ("muon", 32768), ("muon", 60000), ("sgd", 8192))


def batch_table(results: dict[str, Any]) -> str:
    """Accuracy of each optimizer's recipe at each global batch."""
    names = {"nesterov": "Nesterov", "lars": "LARS", "lamb": "LAMB", "novograd": "NovoGrad", "muon": "Muon"}
    lines = ["| | " + " | ".join(f"{batch:,}" for batch in BATCHES) + " |", "|---" * (len(BATCHES) + 1) + "|"]
    for arm, name in names.items():
        cells = [_cell([run["metrics"]["accuracy"] for run in results["runs"] if run["arm"] == f"{arm} {b}"]) for b in BATCHES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def growth_table(growth: dict[str, Any], *others: dict[str, Any]) -> str:
    """Constant and growing batches, by the largest batch, against the same optimizer's small batch.

    Constant ones that the study did not repeat are from `others`.
    """
    lines = [
        "| | largest batch | constant | steps | growing | steps | growing, against the small batch |",
        "|---" * 7 + "|",
    ]
    against = {arm.split()[0]: {**growth, "study": {**growth["study"], "reference": arm}} for arm in REFERENCES}
    for arm in REFERENCES:
        cells = [f"{_title(arm)}", "-", _cell(final_values(growth, arm)), f"{_steps(growth, arm):,}", "-", "-", "-"]
        lines.append("| " + " | ".join(cells) + " |")
    for line, size in GROWN:
        constant, growing = f"{line} {size}", f"{line} to {size}"
        older = constant.replace("sgd", "nesterov")
        sources = [(growth, constant), *((each, older) for each in others)]
        source, name = next(((each, arm) for each, arm in sources if final_values(each, arm)), sources[0])
        cells = [_title(line), f"{size:,}", _cell(final_values(source, name)), f"{_steps(source, name) or '-'}"]
        grown = bool(final_values(growth, growing))
        verdict = difference_words(compare_arm(against[line], growing), "accuracy") if grown else "not run"
        cells += [_cell(final_values(growth, growing)), f"{_steps(growth, growing) or '-'}", verdict]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def headline_table(growth: dict[str, Any]) -> str:
    """README's rows: the references, and Muon growing to each size beside the constant batch."""
    lines = ["| | global batch | steps | accuracy |", "|---|---|---|---|"]
    rows = [(arm, arm.split()[0], f"{int(arm.split()[1]):,}") for arm in REFERENCES[::-1]]
    for growing, constant in ((f"muon to {size}", f"muon {size}") for size in HEADLINE):
        runs = [run for run in growth["runs"] if run["arm"] == growing]
        first = growth["study"]["arms"][growing]["options"]["batch_schedule"].split()[0].partition(":")[2]
        rows.append((growing, "muon", f"{int(first):,} growing to {runs[0]['contract']['global_batch']:,}"))
        rows.append((constant, "muon", f"{runs[0]['contract']['global_batch']:,}"))
    for arm, name, batch in rows:
        lines.append(f"| {_title(name)} | {batch} | {_steps(growth, arm):,} | {_cell(final_values(growth, arm))} |")
    return "\n".join(lines)


def schedule_table(growth: dict[str, Any]) -> str:
    """Each growing arm, by its largest batch: its batches, settings and result."""
    lines = ["| | batches | V | peak lr | momentum | weight decay | averaging | steps | accuracy |", "|---" * 9 + "|"]
    arms = {name: arm["options"] for name, arm in growth["study"]["arms"].items() if final_values(growth, name)}
    growing = {name: options for name, options in arms.items() if options.get("batch_schedule")}
    for name, options in sorted(growing.items(), key=lambda pair: (pair[1]["optimizer"], pair[1]["global_batch"])):
        cells = [_title(name), f"`{options['batch_schedule']}`"]
        cells += [f"{options[key]:g}" for key in ("virtual_workers", "base_lr", "momentum", "weight_decay", "ema")]
        cells += [", ".join(map(str, sorted({run["steps"] for run in growth["runs"] if run["arm"] == name})))]
        lines.append(f"| {' | '.join(cells)} | {_cell(final_values(growth, name))} |")
    return "\n".join(lines)


def _title(arm: str) -> str:
    """An arm's name in a table: `Muon to 8,192`."""
    return re.sub(r"\d{4,}", lambda found: f"{int(found[0]):,}", arm.replace("muon", "Muon").replace("sgd", "SGD"))


def _steps(results: dict[str, Any], arm: str) -> int:
    return next((int(run["steps"]) for run in results["runs"] if run["arm"] == arm and run["steps"]), 0)


def arm_table(wide: dict[str, Any], small: dict[str, Any] | None = None, where: str = "WRN-16-4, H200") -> str:
    """Every arm of a study on WRN-16-4 and, if given, of the same study on the small net. The verdict is the small net's if
    given, because it has more seeds.
    """
    last = small or wide
    head = f"| | global batch | V | {where} |" + (" cnn, CPU |" if small else "") + f" against {last['study']['reference']} |"
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    for arm in wide["study"]["arms"]:
        runs = [run for results in (wide, last) for run in results["runs"] if run["arm"] == arm and run["contract"]]
        cells = [arm, f"{runs[0]['contract']['global_batch']:,}", str(runs[0]["contract"]["virtual_workers"])]
        cells += [_cell(final_values(results, arm)) for results in ((wide, small) if small else (wide,))]
        reference = arm == last["study"]["reference"]
        lines.append(
            "| " + " | ".join([*cells, "-" if reference else difference_words(compare_arm(last, arm), "accuracy")]) + " |"
        )
    return "\n".join(lines)


def course_table(wide: dict[str, Any], small: dict[str, Any]) -> str:
    """The course's arms: the number of epochs of each seed's run, and how many diverged."""
    lines = [
        "| | global batch | WRN-16-4, H200: epochs | accuracy | cnn, CPU: epochs | accuracy | diverged |",
        "|---" * 7 + "|",
    ]
    for arm in wide["study"]["arms"]:
        found = [[run for run in results["runs"] if run["arm"] == arm] for results in (wide, small)]
        epochs = [", ".join(str(run["epochs"]) for run in runs) for runs in found]
        good = [[run for run in runs if run["status"] != Status.DIVERGED] for runs in found]
        accuracy = [_cell([run["metrics"]["accuracy"] for run in runs]) for runs in good]
        lost = sum(map(len, found)) - sum(map(len, good))
        batch = f"{found[1][0]['contract']['global_batch']:,}"
        lines.append(f"| {arm} | {batch} | {epochs[0]} | {accuracy[0]} | {epochs[1]} | {accuracy[1]} | {lost} |")
    return "\n".join(lines)


def registry_table() -> str:
    """The optimizer registry."""
    lines = ["| | what it is | adapts | values kept per weight | sparse gradients | |", "|---|---|---|---|---|---|"]
    for name, entry in OPTIMIZERS.items():
        yes = ["yes" if each else "no" for each in (entry.adapts, entry.sparse)]
        lines.append(f"| `{name}` | {entry.about} | {yes[0]} | {entry.state} | {yes[1]} | {entry.reference} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """All tables of the page, by name."""
    results = {path.stem: read(f"studies/results/{path.name}") for path in (ROOT / "studies" / "results").glob("*.json")}
    search = read("studies/growth_search.json")
    return {
        "growth": growth_table(results["growth"], results["batch"]),
        "headline": headline_table(results["growth"]),
        "schedules": schedule_table(results["growth"]),
        "effects": effects_table(search),
        "batch": batch_table(results["batch"]),
        "ingredients": arm_table(results["ingredients"]),
        "power": arm_table(results["power"], where="cnn, CPU"),
        "workers": arm_table(results["workers"], results["workers-cnn"]),
        "course": course_table(results["course"], results["course-cnn"]),
        "step": optimizer_table(read("bench/results/optimizers.json")),
        "registry": registry_table(),
    }


def optimizer_table(found: dict[str, Any]) -> str:
    """The cost of a step of each optimizer."""
    lines = ["| | alone: us | ratio to AdamW | in a captured step: us | ratio to AdamW |", "|---|---|---|---|---|"]
    for name, eager in found["eager"]["by_optimizer"].items():
        graph = found["graph"]["by_optimizer"].get(name)
        inside = f"{graph['ms']['median'] * 1000:.0f} | {graph['over_adamw']['median']:.2f}" if graph else "- | -"
        lines.append(f"| {name} | {eager['ms']['median'] * 1000:,.0f} | {eager['over_adamw']['median']:.2f} | {inside} |")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.4f}".replace("0.", ".") if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}".replace("0.", ".") + f"{spread} ({len(values)})"


def read(path: str) -> dict[str, Any]:
    """Read a committed result."""
    found: dict[str, Any] = json.loads((ROOT / path).read_text())
    return found


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(tables().values()) + "\n")
