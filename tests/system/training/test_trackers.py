"""Each tracker against its real library, offline: one run, interrupted and resumed, and what the library has of it."""

import json
import struct
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from harness.training import blobs
from paceline import Hooks, Moment
from paceline.files import read_json
from paceline.training.observers import Result
from paceline.training.run import train

STEPS = [2, 4, 6, 8, 9, 11, 13, 15, 17, 18, 20, 22, 24, 26, 27]
EPOCHS = [9, 18, 27]


@pytest.fixture(autouse=True)
def offline(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No account, no server, and nothing outside of this folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")  # would start one more process
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def interrupted_and_resumed(name: str, error: type[BaseException] = InterruptedError) -> Result:
    """A run that fails after step 15 and continues from its checkpoint at step 12."""
    left = [15]

    def fail(moment: Moment) -> None:
        if moment.step in left:
            left.remove(moment.step)
            raise error("for the test")

    task = blobs(hooks=Hooks(on_step=fail))
    with pytest.raises(error):
        train(task, tracker=name, epochs=3, log_every=2, checkpoint_every="6", name="x")
    if name == "wandb":
        time.sleep(1)  # its folders are named by the second
    return train(task, resume="x", save_best=True)


def check(found: dict[str, dict[int, float]], result: Result) -> None:
    """The values that each tracker has, by name and step."""
    assert list(found["train/loss"]) == list(found["train/lr"]) == list(found["train/accuracy"]) == STEPS
    for name in ("validation/loss", "validation/accuracy", "train/epoch_loss", "samples_per_s", "epoch"):
        assert list(found[name]) == EPOCHS, name
    assert found["validation/loss"][27] == pytest.approx(result.metrics["loss"])
    assert list(found["epoch"].values()) == [1, 2, 3]


def test_tensorboard(runs: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = interrupted_and_resumed("tensorboard")
    events = EventAccumulator(str(runs / "x")).Reload()
    check({tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}, result)
    assert [event.step for event in events.Scalars("train/loss")] == STEPS, "no step twice"
    assert {"contract/text_summary", "result/text_summary"} <= set(events.Tags()["tensors"])


def test_mlflow(runs: Path) -> None:
    from mlflow.tracking import MlflowClient

    result = interrupted_and_resumed("mlflow")
    client = MlflowClient(tracking_uri=Path("mlruns").resolve().as_uri())
    (experiment,) = [each for each in client.search_experiments() if each.name == "blobs"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert read_json(runs / "x" / "tracker.json") == {"mlflow": {"run_id": run.info.run_id}}
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    assert [metric.step for metric in history["train/loss"]] == STEPS, "no step twice"
    check({name: {metric.step: metric.value for metric in metrics} for name, metrics in history.items()}, result)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "x")
    assert (run.data.params["log_every"], run.data.params["contract.total_steps"]) == ("2", "27")
    assert run.data.metrics["final/loss"] == pytest.approx(result.metrics["loss"])
    assert run.data.metrics["best/epoch"] == 3
    assert (run.data.tags["status"], run.data.tags["model_sha256"]) == ("done", result.model_sha256)


def test_trackio(runs: Path) -> None:
    result = interrupted_and_resumed("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    known = read_json(runs / "x" / "tracker.json")["trackio"]
    assert SQLiteStorage.get_runs("blobs") == [known["name"]]
    rows = SQLiteStorage.get_logs("blobs", known["name"])
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        for name, value in row.items():
            assert row["step"] not in found[name] or name in ("step", "timestamp"), "a step twice"
            found[name][row["step"]] = value
    check(found, result)
    assert found["final/loss"] == {27: pytest.approx(result.metrics["loss"])}
    assert SQLiteStorage.get_run_config("blobs", known["name"])["log_every"] == 2


def test_wandb(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = interrupted_and_resumed("wandb", KeyboardInterrupt)
    out = capsys.readouterr().out
    assert "W&B: the run is stored offline, because no account was found: wandb login, or set WANDB_API_KEY" in out
    known = read_json(runs / "x" / "tracker.json")["wandb"]
    files = sorted((runs / "x" / "wandb").glob(f"offline-run-*-{known['id']}/run-{known['id']}.wandb"))
    assert len(files) == 2, "one per start, both of one run"
    assert files[1].parent.name in out, "the newest has everything"
    kinds = [{record.WhichOneof("record_type") for record in read_wandb(file)} for file in files]
    assert ["preempting" in found for found in kinds] == [True, False], "an interrupted run has not failed: it may go on"
    files = files[1:]
    found: dict[str, dict[int, float]] = defaultdict(dict)
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for file in files:
        for record in read_wandb(file):
            if record.HasField("run"):
                assert (record.run.run_id, record.run.project, record.run.display_name) == (known["id"], "blobs", "x")
            for item in record.config.update:
                config[item.key] = json.loads(item.value_json)
            for item in record.summary.update:
                summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
            for item in record.history.item:
                name = "/".join(item.nested_key) or item.key
                assert record.history.step.num not in found[name], "a step twice"
                found[name][record.history.step.num] = json.loads(item.value_json)
    check(found, result)
    assert (config["log_every"], config["contract.total_steps"]) == (2, 27)
    assert (summary["status"], summary["model_sha256"]) == ("done", result.model_sha256)
    assert summary["final/loss"] == pytest.approx(result.metrics["loss"])


def read_wandb(path: Path) -> list[Any]:
    """The records of a .wandb file: after 7 bytes, messages in blocks of 32 KiB, in the format of LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, found = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # complete, or the last piece
            found.append(Record.FromString(whole))
            whole = b""
    return found
