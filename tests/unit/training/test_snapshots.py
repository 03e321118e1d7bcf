"""--snapshots: which steps are kept, what is in a file, and what happens if one cannot be written or read."""

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.training import ALONE, Trained, blobs, train_in
from paceline.config import make_config
from paceline.errors import RecordError, UsageError
from paceline.training import snapshots
from paceline.training.checkpoint import keeper
from paceline.training.snapshots import Snapshots, list_snapshots, read_snapshot
from paceline.training.task import Task

STEPS = 18
"""Of two epochs of `blobs`."""


def run(folder: Path, task: Task | None = None, resumes: bool = False, **options: Any) -> Trained:
    """Train `blobs` with this folder as its record."""
    return train_in(ALONE, task or blobs(), {"snapshots": 4, **options}, folder / "checkpoints", resumes)


def steps_in(folder: Path) -> list[int]:
    return [step for step, _ in list_snapshots(folder)]


def bits(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for _, path in list_snapshots(folder)}


def failing(at: int) -> Task:
    """`blobs`, but its objective raises in this pass of the training."""
    task, passes = blobs(), 0

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        nonlocal passes
        passes += model.training
        if passes == at:
            raise InterruptedError
        values: dict[str, Tensor] = task.objective(model, batch)
        return values

    return replace(task, objective=objective)


@pytest.mark.parametrize(
    ("count", "options", "steps"),
    [
        (2, {}, [0, 18]),
        (4, {}, [0, 6, 12, 18]),
        (5, {}, [0, 4, 9, 13, 18]),
        (5, {"max_steps": 7}, [0, 1, 3, 5, 7]),
        (100, {"max_steps": 3}, [0, 1, 2, 3]),
        (4, {"target_accuracy": 1e-9}, [0, 6, 9]),
        (0, {}, []),
    ],
)
def test_they_are_evenly_spaced_with_the_first_and_the_last_state(
    tmp_path: Path, count: int, options: dict[str, Any], steps: list[int]
) -> None:
    run(tmp_path, snapshots=count, **options)
    assert steps_in(tmp_path) == steps
    assert not list(tmp_path.glob("snapshots/.*"))


def test_one_is_refused() -> None:
    with pytest.raises(UsageError, match="--snapshots is 1: it must be 0 or at least 2"):
        make_config({"snapshots": 1})


def test_a_file_has_the_parameters_in_bfloat16(tmp_path: Path) -> None:
    trained = run(tmp_path, blobs(norm=True))
    step, path = list_snapshots(tmp_path)[-1]
    found = read_snapshot(path)
    assert step == STEPS
    assert found.keys() == {name for name in trained.weights if "running" not in name and "num_batches" not in name}
    for name, value in found.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, torch.from_numpy(trained.weights[name]).bfloat16().float(), rtol=0, atol=0)
    assert path.stat().st_size < 1600


def test_other_types_are_kept_sensibly() -> None:
    model = nn.Module()
    kinds = {"wide": torch.float64, "half": torch.float16, "whole": torch.int32, "complex": torch.complex128}
    for name, dtype in kinds.items():
        model.register_parameter(f"a_{name}", nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False))
    found = {name: tensor.dtype for name, tensor in snapshots._small(model).items()}
    expected = {"a_wide": torch.float32, "a_half": torch.bfloat16, "a_whole": torch.int32, "a_complex": torch.complex64}
    assert found == expected


def test_training_weights_with_ema(tmp_path: Path) -> None:
    plain, averaged = run(tmp_path / "a"), run(tmp_path / "b", ema=0.9)
    assert bits(tmp_path / "a") == bits(tmp_path / "b") != {}
    assert plain.result.model_sha256 != averaged.result.model_sha256


@pytest.mark.parametrize("fail_at", [1, 2, 7, 8, 13])
def test_a_resumed_run_writes_the_rest(tmp_path: Path, fail_at: int) -> None:
    run(tmp_path / "whole")
    with pytest.raises(InterruptedError):
        run(tmp_path / "cut", failing(fail_at), checkpoint_every="4")
    run(tmp_path / "cut", checkpoint_every="4", resumes=True)
    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")


def test_a_resumed_run_writes_what_is_missing_at_its_first_step(tmp_path: Path) -> None:
    """A checkpoint may be on disk when the snapshot of the same step is not."""
    with pytest.raises(InterruptedError):
        run(tmp_path, failing(8), checkpoint_every="6")
    (tmp_path / "snapshots" / "step-000000006.safetensors").unlink()
    run(tmp_path, checkpoint_every="6", resumes=True)
    assert steps_in(tmp_path) == [0, 6, 12, 18]


def test_a_checkpoint_waits_for_the_snapshots_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed from it does not write them again."""
    waited, wait, alive = threading.Event(), Snapshots.wait, []
    make = snapshots.copy_then_write

    def slow(*given: Any) -> Any:
        waited.clear()
        write = make(*given)
        return lambda: (waited.wait(60), write())

    def patient(self: Snapshots) -> None:
        waited.set()
        wait(self)

    def save(*_: Any) -> None:
        alive.append([thread.name for thread in threading.enumerate() if thread.name == "snapshots"])

    monkeypatch.setattr(snapshots, "copy_then_write", slow)
    monkeypatch.setattr(Snapshots, "wait", patient)
    monkeypatch.setattr(keeper.Writer, "save", save)
    run(tmp_path, checkpoint_every="6")
    assert alive == [[], [], []]
    assert steps_in(tmp_path) == [0, 6, 12, 18]


def test_a_longer_run_goes_on_with_its_own_steps(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, resumes=True, epochs=4)
    assert steps_in(tmp_path) == [0, 6, 12, 18, 24, 36]


def test_steps_that_come_again_leave_none_behind(tmp_path: Path) -> None:
    """A run that was killed before its first checkpoint begins again, and may be shorter then."""
    run(tmp_path, epochs=4)
    shutil.rmtree(tmp_path / "checkpoints")
    whole = [step for step, _ in list_snapshots(tmp_path)]
    run(tmp_path, resumes=True, epochs=1)
    short = [step for step, _ in list_snapshots(tmp_path)]
    assert max(short) < max(whole)
    shutil.rmtree(tmp_path)
    run(tmp_path, epochs=1)
    assert short == [step for step, _ in list_snapshots(tmp_path)]


def test_while_parts_differ_they_wait(tmp_path: Path) -> None:
    run(tmp_path, snapshots=7, virtual_workers=2, local_steps=4, local_after=0.5)
    assert steps_in(tmp_path) == [0, 3, 6, 9, 13, 17, 18], "averaged after 9, 13, 17 and 18 steps"


def test_growing_batches(tmp_path: Path) -> None:
    options = {"virtual_workers": 4, "global_batch": 32, "smallest_part": 4, "reference_batch": 8, "epochs": 6}
    trained = run(tmp_path, batch_schedule="auto:8", batch_noise_ratio=0.2, **options)
    steps = steps_in(tmp_path)
    assert (steps[0], steps[-1]) == (0, trained.result.steps)
    assert 3 <= len(steps) <= 4
    assert len(trained.watcher.phases) > 1


def test_a_full_disk_is_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        def write() -> None:
            raise OSError(28, "No space left on device")

        return write

    monkeypatch.setattr(snapshots, "copy_then_write", full)
    trained = run(tmp_path)
    notes = [note for note in trained.watcher.notes if "snapshot" in note]
    assert len(notes) == 1
    assert notes[0].startswith("could not write the snapshot after step 0 to ")
    assert notes[0].endswith("snapshots: No space left on device; training continues")
    assert (trained.result.status, trained.result.steps) == ("done", STEPS)


def test_a_file_in_place_of_the_folder_is_one_note(tmp_path: Path) -> None:
    (tmp_path / "snapshots").write_text("")
    trained = run(tmp_path)
    assert trained.result.status == "done"
    assert sum("could not write the snapshot" in note for note in trained.watcher.notes) == 1


def test_workers_without_a_record_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train_in(ALONE, blobs(), {"snapshots": 3})
    assert not list(tmp_path.iterdir())


def test_due_steps_never_exceed_the_number() -> None:
    for count in (2, 3, 7, 50):
        for total in (1, 2, 5, 49, 50, 51, 1000):
            about: Any = SimpleNamespace(
                config=SimpleNamespace(snapshots=count),
                update=SimpleNamespace(schedule=SimpleNamespace(total_steps=total)),
            )
            due = [step for step in range(total + 1) if Snapshots(about, None, print)._is_due(step)]
            assert due == sorted({number * total // (count - 1) for number in range(count)})


def test_without_snapshots_there_are_none(tmp_path: Path) -> None:
    assert list_snapshots(tmp_path) == []
    assert list_snapshots(tmp_path / "nowhere") == []
    (tmp_path / "snapshots").write_text("")
    with pytest.raises(RecordError, match="cannot read the snapshots in"):
        list_snapshots(tmp_path)


def test_other_files_are_left_out(tmp_path: Path) -> None:
    run(tmp_path)
    for name in ("step-7.safetensors", ".step-000000003.safetensors.12.part", "notes.txt"):
        (tmp_path / "snapshots" / name).write_text("x")
    (tmp_path / "snapshots" / "step-000000003.safetensors").mkdir()
    assert steps_in(tmp_path) == [0, 6, 12, 18]


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    run(tmp_path)
    (_, path), *_ = list_snapshots(tmp_path)
    good = path.read_bytes()
    for bad in (good[:-1], good[:20], b"", good[:-1] + bytes([good[-1] ^ 1]), good[:8] + b"x" + good[9:], b"\xff" * 100):
        path.write_bytes(bad)
        with pytest.raises(RecordError, match=r"cannot read the snapshot .*: it is damaged \(") as caught:
            read_snapshot(path)
        assert "\n" not in str(caught.value)


def test_a_file_that_is_none_is_one_line(tmp_path: Path) -> None:
    for name, why in (
        ("step-000000003.safetensors", "there is no such file"),
        ("model.safetensors", "it is not named like step-"),
    ):
        with pytest.raises(RecordError, match=why):
            read_snapshot(tmp_path / name)
    os.mkfifo(tmp_path / "step-000000004.safetensors")
    with pytest.raises(RecordError, match="there is no such file"):
        read_snapshot(tmp_path / "step-000000004.safetensors")
