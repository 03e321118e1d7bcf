"""Any folder or file as a source: complete records, and everything that can be wrong with one."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.pages import make_growing, make_landscapes, make_scale, make_timeline, make_train
from paceline.board.summaries import read_summary
from paceline.report.read import read_source
from paceline.report.sources import find_sources
from paceline.report.summary import headline

STUDY = Path(__file__).parents[3] / "studies" / "results" / "batch.json"


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return make_train(tmp_path / "runs" / "demo")


def test_a_complete_record(demo: Path) -> None:
    source = read_source(make_landscapes(make_timeline(demo)))
    assert (source["kind"], source["name"], source["status"], source["tone"]) == ("train", "demo", "done", "good")
    assert source["problems"] == []
    assert source["notes"] == ["all workers agree"]
    assert ["model", "cnn, 29,434 parameters"] in source["contract"]
    assert ["workers", "P = 2 (V = 2 parts, one per worker), started here, 1 node"] in source["contract"]
    assert source["environment"]["command"] == "paceline train 'a b'"
    assert source["environment"]["torch"] == "2.13.0"
    assert source["series"]["step"]["epoch"][:2] == [0.25, 0.5]
    assert source["series"]["epoch"]["val_accuracy"][-1] == 0.88
    assert source["where"]["components_s"]["compute"] == 0.02
    assert source["where"]["slowest"] == 1
    assert source["timeline"]["steps"][0]["step"] == 21
    assert source["landscapes"][1]["x"][0] == -1
    assert source["summary"].startswith("demo trained cnn on fashion-mnist-mini with 2 workers")
    json.dumps(source, allow_nan=False)


def test_a_file_in_a_record_stands_for_the_record(demo: Path) -> None:
    assert read_source(demo / "metrics.jsonl")["name"] == "demo"


def test_scale_records_and_studies(tmp_path: Path) -> None:
    scale = read_source(make_scale(tmp_path / "scale-x"))
    assert (scale["kind"], scale["status"], len(scale["scale"]["counts"])) == ("scale", "done", 3)
    assert ["model", "cnn, 29,434 parameters"] in scale["contract"]
    assert "workers" not in dict(scale["contract"])  # it differs from count to count
    study = read_source(STUDY)
    assert (study["kind"], study["status"], study["name"]) == ("study", "incomplete", "study-batch")
    (tmp_path / "s").mkdir()
    shutil.copy(STUDY, tmp_path / "s" / "study.json")
    assert read_source(tmp_path / "s")["study"]["arms"] == study["study"]["arms"]


def test_a_run_with_a_writer_is_running_and_one_without_was_cut_short(demo: Path) -> None:
    (demo / "result.json").unlink()
    with (demo / "metrics.jsonl").open("ab") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert read_source(demo)["status"] == "running"
        assert "is training" in read_source(demo)["summary"]
        assert read_summary(demo)["status"] == "running"
    source = read_source(demo)
    assert source["status"] == "cut short"
    assert any("cut short" in problem for problem in source["problems"])


def snapshot(folder: Path) -> dict[str, Any]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_reading_writes_nothing(demo: Path) -> None:
    before = snapshot(demo)
    read_source(demo)
    read_summary(demo)
    find_sources(demo.parent)
    assert snapshot(demo) == before


BROKEN = {
    "empty": b"",
    "half": b'{"kind": "step", "step": 1, "lo',
    "binary": bytes(range(256)) * 10,
    "list": b"[1, 2]\n",
    "null": b"null\n",
    "deep": b"[" * 200_000,
    "wrong kinds": b'{"kind": {}, "status": [], "contract": 3, "metrics": "x", "counts": {"a": 1}, "study": 1, "runs": 2}\n',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "environment.json",
        "result.json",
        "timeline.json",
        "landscape/path.json",
        "sharpness.json",
        "scale.json",
        "study.json",
        "learning-curve.json",
        "toys.json",
        "x.json",
    ],
)
def test_no_broken_file_stops_the_page(demo: Path, name: str, content: bytes) -> None:
    make_landscapes(make_timeline(demo))
    if name in ("scale.json", "study.json", "learning-curve.json", "toys.json"):
        shutil.rmtree(demo)
        demo.mkdir()
    if name == "learning-curve.json":
        shutil.copy(STUDY, demo / "study.json")
    (demo / name).write_bytes(content)
    source = read_source(demo / name if name == "x.json" else demo)
    assert source["problems"], "a broken file must be listed"
    assert source["summary"]
    json.dumps(source, allow_nan=False)
    assert read_summary(demo)["name"] == "demo"


def test_a_pipe_or_a_folder_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(make_landscapes(make_train(tmp_path / "r")) / "landscape" / "a.json")
    os.mkfifo(tmp_path / "r" / "sharpness.json")
    for name in ("metrics.jsonl", "result.json"):
        (tmp_path / "r" / name).unlink()
        os.mkfifo(tmp_path / "r" / name)
    (tmp_path / "r" / "timeline.json").mkdir()
    assert "metrics.jsonl is missing: no curves" in read_source(tmp_path / "r")["problems"]
    assert read_summary(tmp_path / "r")["task"] == "fashion-mnist-mini"


@pytest.mark.parametrize("missing", ["metrics.jsonl", "environment.json"])
def test_a_missing_file_is_listed(demo: Path, missing: str) -> None:
    (demo / missing).unlink()
    assert any(missing in problem for problem in read_source(demo)["problems"])


def test_folders_and_paths_that_are_not_records(tmp_path: Path) -> None:
    assert "no such file" in read_source(tmp_path / "gone")["problems"][0]
    assert "not a record" in read_source(tmp_path)["problems"][0]
    (tmp_path / "other.json").write_text('{"a": 1}')
    assert "neither" in read_source(tmp_path / "other.json")["problems"][0]


def test_a_contract_with_missing_fields_shows_the_others(demo: Path) -> None:
    (demo / "environment.json").write_text(json.dumps({"contract": {"model": "cnn", "workers": "many", "peak_lr": None}}))
    assert read_source(demo)["contract"] == [["model", "cnn"], ["workers", "many"]]


@pytest.mark.parametrize(
    ("facts", "unit"),
    [
        ({"unit": "windows"}, "windows"),
        ({}, "images"),  # a record from before contracts had a unit
        ({"task": "my_task.py"}, "samples"),
        ({"task": "my_task.py", "unit": ["no", "text"]}, "samples"),
    ],
)
def test_what_samples_are_called(tmp_path: Path, facts: dict[str, Any], unit: str) -> None:
    path = make_train(tmp_path / "r", **facts)
    assert read_source(path)["unit"] == read_summary(path)["unit"] == unit


def append(path: Path, *rows: dict[str, Any]) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_running_run_has_its_time_and_its_steps_from_the_same_row(demo: Path) -> None:
    (demo / "result.json").unlink()
    append(demo, {"kind": "step", "step": 80, "epoch": 4, "time_s": 9.5, "loss": 0.1})
    assert (read_source(demo)["last"]["steps"], read_source(demo)["last"]["time_s"]) == (80, 9.5)
    append(demo, {"kind": "epoch", "step": 80, "epoch": 4, "time_s": 9.75})
    assert read_source(demo)["last"]["time_s"] == 9.75


def test_a_run_resumed_on_other_workers_has_theirs_in_the_list_and_its_command_on_the_page(demo: Path) -> None:
    about = {"command": ["paceline", "train", "--resume", "a b"], "contract": {"workers": 4}}
    append(demo, {"kind": "resume", "step": 40, **about}, {"kind": "step", "step": 41, "loss": 0.5})
    source = read_source(demo)
    assert read_summary(demo)["workers"] == source["facts"]["workers"] == 4
    assert source["environment"]["command"] == "paceline train 'a b'"
    assert source["environment"]["resumed with"] == "paceline train --resume 'a b'"
    (demo / "result.json").unlink()
    line = read_summary(demo)
    assert (line["steps"], line["accuracy"]) == (41, pytest.approx(0.68))  # the epochs after step 40 are repeated


def test_a_growing_batch_is_shown_as_such(tmp_path: Path) -> None:
    path = make_growing(tmp_path / "growing")
    source = read_source(path)
    assert [(phase["step"], phase["global_batch"], phase["virtual_workers"]) for phase in source["phases"]] == [
        (0, 150, 1),
        (10, 450, 2),
    ]
    assert source["batch"] == "150 to 450 in 2 phases"
    assert "(V = 2, global batch 150 to 450 in 2 phases) to accuracy" in source["summary"]
    assert source["facts"]["total_steps"] == 60  # as of the last phase
    line = read_summary(path)
    assert (line["global_batch"], line["total_steps"]) == ({"low": 150, "high": 450}, 60)
    append(path, {"kind": "resume", "step": 10, "contract": {"total_steps": 70}}, {"kind": "step", "step": 20})
    again = read_source(path)
    assert (len(again["phases"]), again["batch"], again["facts"]["total_steps"]) == (1, "", 70)
    assert (read_summary(path)["global_batch"], read_summary(path)["total_steps"]) == (150, 70)


def test_the_phases_of_a_given_schedule_are_known_before_they_begin(tmp_path: Path) -> None:
    planned = [
        {"start": start, "global_batch": batch, "virtual_workers": 2, "steps": 40} for start, batch in ((0.0, 150), (2.0, 300))
    ]
    path = make_train(tmp_path / "run", phases=[*planned, "no phase"])
    source = read_source(path)
    assert source["batch"] == "150 to 300 in 2 phases"
    # A run that branched off has no rows of earlier phases. At step 60, it is in the second.
    assert [(phase["step"], phase["epoch"]) for phase in source["phases"]] == [(0, 0.0), (40, 2.0)]
    assert read_summary(path)["global_batch"] == {"low": 150, "high": 300}
    (path / "result.json").unlink()
    (path / "metrics.jsonl").write_text("")
    assert read_source(path)["phases"] == []


def test_a_constant_batch_has_no_phases(demo: Path) -> None:
    source = read_source(demo)
    assert (source["phases"], source["batch"]) == ([], "")
    assert "global batch 256)" in source["summary"]


def test_the_worker_that_the_others_wait_for_and_its_lag(demo: Path) -> None:
    rows = [
        {"kind": "health", "step": 61 + n, "components_s": {"compute": 1.0}, "slowest": 1, "lag_s": 0.004} for n in range(3)
    ]
    append(demo, *rows, {"kind": "health", "step": 70, "components_s": {"compute": 1.0}, "slowest": 0, "lag_s": 9.0})
    where = read_source(demo)["where"]
    assert (where["slowest"], where["lag_s"]) == (1, pytest.approx(0.003))
    append(demo, *[row | {"step": 71 + place, "slowest": 0} for place, row in enumerate(rows)])
    where = read_source(demo)["where"]
    assert (where["slowest"], where["lag_s"]) == (None, None)  # six of ten rows are not two thirds


def fail(record: Path, status: str = "failed", **said: Any) -> Path:
    result = json.loads((record / "result.json").read_text())
    (record / "result.json").write_text(json.dumps({**result, "status": status, **said}))
    return record


def test_a_failed_run_has_its_error_the_users_line_and_the_traceback(demo: Path) -> None:
    trace = "Traceback:\n\tFile x\x1b[31m\n" + "".join(f"  line {place}\n" for place in range(5_000)) + "ValueError: no\n"
    where = "my_task.py, line 12, in objective\n    return model(batch).loss"
    source = read_source(fail(demo, why="ValueError: no", where=where, traceback=trace))
    assert (source["error"]["why"], source["error"]["where"]) == ("ValueError: no", where)
    assert source["error"]["traceback"].startswith("... ")
    assert source["error"]["traceback"].endswith("\n  line 4999\nValueError: no")
    assert "ValueError: no. It was set to train" in source["summary"]
    assert headline([source]).startswith(
        "demo failed after 60 of 60 steps. It was set to train cnn"
    )  # the page shows the error
    source = read_source(fail(demo, "diverged", why="diverged: the loss is nan", where=3, traceback=None))
    assert source["error"] == {"why": "the loss is nan", "where": "", "traceback": ""}
    assert read_source(fail(demo, "interrupted", why="SIGTERM"))["error"] is None
    assert read_source(fail(demo, "done"))["error"] is None


def test_options_are_read_to_compare_runs(demo: Path) -> None:
    assert read_source(demo)["options"] == {}
    (demo / "config.toml").write_text('label_smoothing = 0.1\nflip = true\nname = "a\\u001bb"\nx = [1]\n')
    assert read_source(demo)["options"] == {"label_smoothing": 0.1, "flip": True, "name": "a b"}
    (demo / "config.toml").write_text("= broken")
    assert read_source(demo)["options"] == {}


def test_a_run_without_validation_and_one_that_was_extended_after_it_was_done(demo: Path) -> None:
    rows = [json.loads(line) for line in (demo / "metrics.jsonl").read_text().splitlines()]
    more = [{**rows[-2], "kind": "epoch", "step": step, "epoch": step // 20, "val_accuracy": 0.9} for step in (60, 80)]
    resume = {"kind": "resume", "step": 60, "contract": {"total_steps": 80, "epochs": 4}}
    (demo / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, resume, *more]))
    source = read_source(fail(demo, "done", metrics={"accuracy": 0.9}, steps=80, epochs=4))
    assert source["problems"] == []
    assert source["series"]["epoch"]["epoch"] == [1, 2, 3, 4]
    assert source["facts"]["total_steps"] == 80
    assert "to accuracy 0.9000 in 4 epochs" in source["summary"]
    bare = [{name: value for name, value in row.items() if not name.startswith("val_")} for row in rows]
    (demo / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare))
    source = read_source(fail(demo, "done", metrics={}, steps=60, epochs=3))
    assert source["problems"] == []
    assert (source["last"]["accuracy"], source["last"]["loss"], source["last"]["train_loss"]) == (None, None, 0.05)
    assert source["summary"].startswith(
        "demo trained cnn on fashion-mnist-mini with 2 workers (V = 2, global batch 256), in 3 epochs"
    )
