"""The arms of the committed studies run to their ends."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline import cli
from paceline.status import Status
from paceline.study.study import list_runs, read_study, shrink
from unit.study.test_studies import STUDIES, arms_in


@pytest.fixture
def own_process(runs: Path) -> Iterator[None]:
    """Reset what would otherwise leak from one call into the next, and work in an empty folder."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_mini_version_finishes_its_arms(path, capsys):
    """In large studies every third arm, of which each differs from its neighbors in a few options; all options are checked."""
    names = [run.arm for run in list_runs(shrink(read_study(path)))]
    arms = names if len(names) <= 10 else names[::3]
    assert cli.run(["study", str(path), "--mini", *(word for arm in arms for word in ("--only", arm))]) == 0
    printed = capsys.readouterr().out
    found = json.loads(Path(f"runs/study-{path.stem}-mini/study.json").read_text())
    assert {run["arm"]: run["why"] for run in found["runs"] if not Status(run["status"]).good} == {}
    assert [run["arm"] for run in found["runs"]] == arms
    assert all(run["steps"] >= 3 for run in found["runs"])
    assert all(f"\n{arm} " in printed for arm in names)
    assert arms_in(Path(f"runs/study-{path.stem}-mini/results.md").read_text()) == names
