"""Every arm of the committed studies runs to its end."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline import cli
from paceline.status import Status
from paceline.study.study import read_study
from unit.study.test_studies import STUDIES, arms_in


@pytest.fixture
def own_process(runs: Path) -> Iterator[None]:
    """Reset what would otherwise leak from one call into the next, and work in an empty folder."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_mini_version_finishes_every_arm(path, capsys):
    arms = [arm.name for arm in read_study(path).arms]
    assert cli.run(["study", str(path), "--mini"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(Path(f"runs/study-{path.stem}-mini/study.json").read_text())
    assert {run["arm"]: run["why"] for run in found["runs"] if not Status(run["status"]).good} == {}
    assert [run["arm"] for run in found["runs"]] == arms
    assert all(run["steps"] >= 3 for run in found["runs"])
    assert all(f"\n{arm} " in printed for arm in arms)
    assert arms_in(Path(f"runs/study-{path.stem}-mini/results.md").read_text()) == arms
