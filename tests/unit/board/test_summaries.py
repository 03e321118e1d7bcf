"""One line of the list of runs: from a result, or from the last rows of a run that has none."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.boards import begin_run, end_run, make_study
from harness.pages import make_scale, make_train
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


def test_the_best_validation_is_not_the_last(demo: Path) -> None:
    append(demo, {"kind": "epoch", "step": 80, "epoch": 4, "val_accuracy": 0.95, "val_loss": 0.2})
    append(demo, {"kind": "epoch", "step": 100, "epoch": 5, "val_accuracy": 0.7, "val_loss": 0.9, "time_s": 9.5})
    assert (read_summary(demo)["accuracy"], read_summary(demo)["best"]) == (0.88, 0.95)  # the last one is the result's
    (demo / "result.json").unlink()
    line = read_summary(demo)
    assert [line[name] for name in ("accuracy", "best", "epochs", "total_epochs", "time_s")] == [0.7, 0.95, 5, 3, 9.5]


def test_the_best_loss_of_a_run_without_accuracies_is_its_lowest(tmp_path: Path) -> None:
    live = begin_run(tmp_path, "live")
    for step, loss in ((10, 0.5), (20, 0.2), (30, 0.4)):
        live.row({"kind": "epoch", "step": step, "epoch": step // 10, "val_loss": loss})
    line = read_summary(tmp_path / "live")
    assert (line["loss"], line["best"], line["accuracy"]) == (0.4, 0.2, None)
    live.row({"kind": "resume", "step": 15})  # the epochs of steps 20 and 30 will be repeated
    assert read_summary(tmp_path / "live")["best"] == 0.5
    end_run(live)


@pytest.mark.parametrize("best", [None, "f1", {}, {"metric": "f1"}, {"metric": "f1", "value": "high"}])
def test_a_run_without_a_monitored_metric_has_none_in_the_list(demo: Path, best: Any) -> None:
    result = json.loads((demo / "result.json").read_text())
    (demo / "result.json").write_text(json.dumps({**result, "best": best}))
    assert read_summary(demo)["monitored"] is None


def test_the_monitored_metric_is_in_the_list(demo: Path) -> None:
    result = json.loads((demo / "result.json").read_text())
    result |= {"best": {"metric": "f1", "value": 0.9, "epoch": 2}, "metrics": {**result["metrics"], "f1": 0.8}}
    (demo / "result.json").write_text(json.dumps(result))
    assert read_summary(demo)["monitored"] == {"metric": "f1", "best": 0.9, "last": 0.8}


def test_the_best_of_a_very_long_file_is_in_the_csv_or_unknown(demo: Path) -> None:
    with (demo / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", "step": 61}\n' * 40_000)
    (demo / "course.csv").write_text("time,val_accuracy\n1.0,0.9100\n2.0,nan\n3.0,0.8800\n4.0,")
    assert read_summary(demo)["best"] == 0.91
    (demo / "course.csv").unlink()
    assert read_summary(demo)["best"] is None


@pytest.mark.parametrize("status", ["failed", "interrupted", "diverged"])
def test_a_run_that_did_not_finish_says_why_in_one_line(tmp_path: Path, status: str) -> None:
    end_run(begin_run(tmp_path, "one"), status=status, why=f"{status}: out of\tmemory\nTraceback ...")
    assert read_summary(tmp_path / "one")["why"] == "out of memory"
    for why in ("", None, 7, {"a": 1}):
        (tmp_path / "one" / "result.json").write_text(json.dumps({"status": status, "why": why}))
        assert read_summary(tmp_path / "one")["why"] == ""


def test_a_scaling_measurement_and_a_study_say_what_they_found(tmp_path: Path) -> None:
    line = read_summary(make_scale(tmp_path / "scale"))
    assert line["workers"] == {"low": 1, "high": 4}
    assert line["detail"].startswith("1 to 4 workers: ")
    line = read_summary(make_study(tmp_path, "study", {"one": 0.8, "two": 0.9}, seeds=[0, 1]))
    assert (line["planned"], line["failed"]) == (4, 0)
    assert line["detail"] == "best arm: two, accuracy 0.9000 (1)"
