"""One line of the list of runs: from a result, or from the last rows of a run that has none."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.pages import make_train
from paceline.board.summaries import read_summary
from paceline.report.read import read_source


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return make_train(tmp_path / "runs" / "demo")


def append(path: Path, *rows: dict[str, Any]) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_summary_of_a_finished_and_of_a_running_run(demo: Path) -> None:
    line = read_summary(demo)
    assert (line["task"], line["workers"], line["accuracy"], line["steps"]) == ("fashion-mnist-mini", 2, 0.88, 60)
    (demo / "result.json").unlink()
    line = read_summary(demo)
    assert (line["status"], line["steps"], line["accuracy"], line["samples_per_s"]) == ("cut short", 60, 0.88, 7860)


def test_a_summary_reads_only_the_end_of_a_long_file(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (demo / "result.json").unlink()
    with (demo / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", "step": 9}\n' * 50_000)
    read: list[int] = []
    monkeypatch.setattr("paceline.board.summaries.parse_row", lambda line: read.append(len(line)))
    read_summary(demo)
    assert 0 < sum(read) < 20_000


def test_a_summary_finds_the_last_validation_above_many_steps_and_the_speed_that_the_page_has(demo: Path) -> None:
    (demo / "result.json").unlink()
    steps = [{"kind": "step", "step": 61 + index, "epoch": 4, "loss": 0.5} for index in range(2_000)]
    append(demo, {"kind": "epoch", "step": 60, "epoch": 3, "samples_per_s": 7000.0}, *steps)  # one without a validation
    append(demo, {"kind": "health", "step": 2060, "samples_per_s": 9.0, "components_s": {}})
    line, last = read_summary(demo), read_source(demo)["last"]
    names = ("accuracy", "loss", "samples_per_s", "steps")
    assert [line[name] for name in names] == pytest.approx([last[name] for name in names])
    assert (line["accuracy"], line["samples_per_s"], line["steps"]) == (0.88, 7000, 2060)


def test_a_row_repeated_after_an_earlier_resume_is_skipped(demo: Path) -> None:
    """Every later resume counts, not only the last one. What was repeated here had no validation."""
    (demo / "result.json").unlink()
    append(demo, {"kind": "resume", "step": 20}, {"kind": "epoch", "step": 70, "epoch": 2}, {"kind": "resume", "step": 70})
    assert read_source(demo)["last"]["accuracy"] is None
    assert read_summary(demo)["accuracy"] is None
