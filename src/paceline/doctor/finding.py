"""What a check found, as one line per subject, and the verdict on the machine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "slow", "wrong"]
_LEVELS: tuple[Level, ...] = ("ok", "note", "slow", "wrong")


@dataclass(frozen=True)
class Finding:
    """One fact about a subject. `note`: works, but worth knowing; `slow`: slows training; `wrong`: keeps runs from working."""

    level: Level
    what: str
    text: str
    fix: str = ""
    detail: bool = False
    """Whether only --verbose shows it. A finding that is not ok is always shown."""


def merge(what: str, findings: Iterable[Finding]) -> Finding:
    """All findings about one subject as one; the worst comes first, and details are left out."""
    shown = [each for each in findings if not each.detail or each.level != "ok"]
    ordered = sorted(shown, key=lambda each: -_LEVELS.index(each.level))
    fixes = dict.fromkeys(each.fix for each in ordered if each.fix)
    return Finding(ordered[0].level if ordered else "ok", what, "; ".join(each.text for each in ordered), ", and ".join(fixes))


def line(finding: Finding) -> str:
    """A finding as one line of text."""
    fix = f"; fix: {finding.fix}" if finding.fix else ""
    return f"{finding.level:<5} {finding.what:<9} {' '.join(finding.text.split())}{fix}"


def verdict(merged: Sequence[Finding]) -> str:
    """Whether this machine will train well."""
    wrong, slow = ([each.what for each in merged if each.level == level] for level in ("wrong", "slow"))
    if wrong:
        return f"{len(wrong)} problem{'s' * (len(wrong) > 1)} to fix: {', '.join(wrong)}"
    return f"will train, but slowly: see {', '.join(slow)}" if slow else "ready to train"
