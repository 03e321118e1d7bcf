"""The committed studies: each can be run, and each committed result belongs to the study of the same name."""

from pathlib import Path

import pytest

from paceline.config import make_config
from paceline.study.results import markdown, read_results
from paceline.study.study import read_study

FOLDER = Path(__file__).parents[3] / "studies"


STUDIES = sorted(FOLDER.glob("*.toml"))


RESULTS = sorted(path for path in FOLDER.glob("results/*.json") if path.stem != "learning-curve")  # that one has a verb


def arms_in(text: str) -> list[str]:
    """The first cells of a table's rows, without the header."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [row.removeprefix("| ").partition(" | ")[0] for row in rows[1:]]


def study_of(path: Path) -> tuple[Path, bool]:
    """The study that results belong to, and whether they use its options: results with a dash in their name do not."""
    exact = FOLDER / f"{path.stem}.toml"
    return (exact, True) if exact.exists() else (FOLDER / f"{path.stem.partition('-')[0]}.toml", "-" not in path.stem)


def test_there_are_studies():
    assert STUDIES


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_match_the_study_file(path):
    file, same_options = study_of(path)
    assert file.exists(), f"{path.name} belongs to no study in {FOLDER}"
    found, study = read_results(path), read_study(file)
    recorded = found["study"]["arms"]
    arms = {arm.name: arm.options for arm in study.arms}
    assert recorded.keys() <= arms.keys()  # some may not have been run yet
    assert {run["arm"] for run in found["runs"]} <= recorded.keys()
    assert found["study"]["reference"] == study.reference
    assert sorted(arms_in(markdown(found))) == sorted(name.replace("|", "\\|") for name in recorded)
    if same_options:
        for name, about in recorded.items():
            assert make_config(about["options"]) == make_config(arms[name]), name
