"""The phases of a record whose batch changed (`--batch-schedule`), or whose workers did, and the rows that belong to each.

A `phase` row marks the first step of a phase. A health row is about the steps since the last look: with `steps` it says how
many; in older records, since the last health row or the start of the epoch. It counts only if all its steps are in one phase.
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.output import plural
from paceline.phases import Phase
from paceline.plan.fields import BadField, number, whole

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A phase of a run, with its rows."""

    phase: Phase
    step: int
    """Its first step."""
    rows: tuple[Row, ...]
    """Health rows that are about this phase only."""
    noise: tuple[Row, ...]
    """Step rows of this phase."""

    def samples(self, row: Row, workers: int) -> int:
        """The samples of the worker with the most, in a full step that this health row is about. Older rows do not say."""
        if "samples_per_worker" in row:
            return whole(row, "samples_per_worker")
        return -(-self.phase.parts // workers) * self.phase.part_batch


def settle_workers(rows: Sequence[Row], contract: Row) -> tuple[list[Row], Row, str]:
    """Of a run that continued on other workers, keep those that timed most sizes of steps or, of equally many, most steps.

    Returns the rows without those that timed others, the contract of these workers, and which steps count if there were others.
    """
    now, contracts, whose = contract, {}, []
    timed: dict[tuple[int, int, str], list[Row]] = {}
    for row in rows:
        if row.get("kind") == "resume" and isinstance(row.get("contract"), Mapping):
            now = {**contract, **row["contract"]}
        key = whole(now, "workers"), whole({"nodes": 1, **now}, "nodes"), str(now.get("devices", ""))
        whose.append(key)
        contracts[key] = now
        if row.get("kind") == "health":
            timed.setdefault(key, []).append(row)
    if not timed:
        return list(rows), contract, ""
    worth = {
        key: (len({row.get("samples_per_worker") for row in found}), sum(row.get("steps", 1) for row in found))
        for key, found in timed.items()
    }
    chosen = max(worth, key=lambda key: worth[key])
    kept = [row for row, key in zip(rows, whose, strict=True) if key == chosen or row.get("kind") != "health"]
    others = " and ".join(_place(*key) for key in sorted(timed) if key != chosen)
    said = f"the steps that count are those on {_place(*chosen)}; the run was also on {others}" if others else ""
    return kept, contracts[chosen], said


def _place(workers: int, nodes: int, devices: str) -> str:
    return (devices or plural(workers, "worker")) + (f" on {nodes:,} nodes" if nodes > 1 else "")


def read_phases(rows: Sequence[Row], contract: Row) -> tuple[Phase, ...]:
    """The phases of a run; empty if it had no batch schedule. With "auto", the contract does not know those that came later."""
    begun = [row for row in rows if row.get("kind") == "phase"]
    planned = contract.get("phases") or ()
    if not isinstance(planned, list | tuple) or not all(isinstance(each, Mapping) for each in planned):
        raise BadField("phases are not a list of tables")
    if len(planned) >= len(begun):
        return tuple(_phase(each) for each in planned)
    return tuple(_phase(row) for row in begun)


def split_rows(rows: Sequence[Row]) -> tuple[Stretch, ...]:
    """The stretches of a run that began, in order."""
    begun = [row for row in rows if row.get("kind") == "phase"]
    first = [whole(row, "step", least=0) for row in begun]
    health: list[list[Row]] = [[] for _ in begun]
    others: list[list[Row]] = [[] for _ in begun]
    since = 0
    for row in rows:
        kind, step = row.get("kind"), row.get("step")
        if kind == "health" and isinstance(row.get("components_s"), Mapping):
            end = whole(row, "step")
            since = end - whole(row, "steps") if "steps" in row else since
            before, last = (bisect.bisect_right(first, each) - 1 for each in (since, end - 1))
            if begun and before == last >= 0:
                health[last].append(row)
        elif kind == "step" and begun and isinstance(step, int) and step > 0:
            others[max(0, bisect.bisect_right(first, step - 1) - 1)].append(row)
        if kind in ("health", "epoch", "resume") and isinstance(step, int):
            since = step
    return tuple(
        Stretch(phase=_phase(row), step=at, rows=tuple(mine), noise=tuple(steps))
        for row, at, mine, steps in zip(begun, first, health, others, strict=True)
    )


def _phase(found: Row) -> Phase:
    """From a row, or from the contract. Older rows say only when the phase began, which may be a little after its start."""
    start = number(found, "start" if "start" in found else "epoch")
    return Phase(start, whole(found, "global_batch"), whole(found, "virtual_workers"))
