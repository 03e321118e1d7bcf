"""Every arm of the committed studies runs to its end."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline import cli
from paceline.study.results import GOOD
from paceline.study.study import read_study
from unit.study.test_studies import STUDIES, arms_in


@pytest.fixture
def own_process(runs: Path) -> Iterator[None]:
    """As if each call had a process of its own, in an empty folder."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_its_mini_version_runs_every_arm_to_its_end(path, capsys):
    arms = [arm.name for arm in read_study(path).arms]
    assert cli.run(["study", str(path), "--mini"]) == 0
    found = json.loads(Path(f"runs/study-{path.stem}-mini/study.json").read_text())
    assert {run["arm"]: run["why"] for run in found["runs"] if run["status"] not in GOOD} == {}
    assert [run["arm"] for run in found["runs"]] == arms
    assert all(run["steps"] >= 3 for run in found["runs"])
    assert arms_in(capsys.readouterr().out) == arms
