"""Shared by the benches: real workers, medians with spread, and results that record how they were made."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from paceline.records import environment

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from harness import faults as faults
from harness.namespaces import Node as Node
from harness.processes import children as children
from harness.processes import run_workers as run_workers


def spread(values: list[float], digits: int = 3) -> dict[str, float]:
    """Median, smallest and largest."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


def write(path: str, result: dict[str, Any]) -> None:
    """Write a result together with the command and the environment that made it."""
    command = " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    about = {name: value for name, value in environment().items() if name not in ("machine", "command")}
    Path(path).write_text(json.dumps({"command": command, **result, "environment": about}, indent=2) + "\n")
    print(f"written to {path}")
