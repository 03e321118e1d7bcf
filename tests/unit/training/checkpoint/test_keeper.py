"""When a checkpoint is due, what goes into it, and how a run comes back from it."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from harness.training import Watcher, blobs
from paceline.config import Config, make_config
from paceline.dist.world import world
from paceline.errors import Stopped, UsageError
from paceline.training import tasks
from paceline.training.build import Run, build
from paceline.training.checkpoint import keeper
from paceline.training.checkpoint.file import load_latest
from paceline.training.checkpoint.keeper import Keeper, _check_identity, check_unchanged
from paceline.training.loop import fit
from paceline.training.observers import Result


def one_run(
    folder: Path | None, resumes: bool = False, fail_at: int | None = None, watch: Any = None, **options: Any
) -> tuple[Run, Watcher, Result]:
    """Train blobs, perhaps up to a step in which the objective raises, or as long as the watch lets it."""
    passes = 0
    task = blobs(norm=True)

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        nonlocal passes
        passes += model.training
        if passes == fail_at:
            raise InterruptedError
        return task.objective(model, batch)

    options = {"log_every": 4, "checkpoint_every": "3", **options}
    watcher = Watcher()
    with world() as here:
        run = build(replace(task, objective=objective), make_config(task.defaults, options), here)
        result = fit(run, [watcher], Keeper(run, folder, watcher.say, resumes), watch)
    return run, watcher, result


def quiet(text: str) -> None:
    raise AssertionError(text)


def test_every_so_many_steps(tmp_path: Path) -> None:
    one_run(tmp_path, keep=100)
    steps = sorted(int(path.stem.partition("-")[2]) for path in tmp_path.iterdir())
    assert steps == [3, 6, 9, 12, 15, 18]


def test_every_so_many_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves a second each time the keeper looks: a wish a step, of which one in three or so is granted."""
    now = 0.0

    def monotonic() -> float:
        nonlocal now
        now += 1
        return now

    monkeypatch.setattr("paceline.training.checkpoint.keeper.time.monotonic", monotonic)
    one_run(tmp_path, checkpoint_every="3s", keep=100)
    steps = sorted(int(path.stem.partition("-")[2]) for path in tmp_path.iterdir())
    assert len(steps) >= 4
    assert all(3 <= b - a <= 4 for a, b in itertools.pairwise(steps))


def test_none_at_all(tmp_path: Path) -> None:
    one_run(tmp_path / "x", checkpoint_every="0")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("fail_at", [5, 9, 10, 11, 17])
def test_rows_and_times_go_on_where_they_were(tmp_path: Path, fail_at: int) -> None:
    """Rows are means over four steps and an epoch has nine: the sums of a row begun before the checkpoint go on after it."""
    _, calm, whole = one_run(None)
    with pytest.raises(InterruptedError):
        one_run(tmp_path, fail_at=fail_at)
    saved = load_latest(tmp_path, quiet)
    assert saved is not None
    assert saved.step == (fail_at - 1) // 3 * 3
    _, watcher, result = one_run(tmp_path, resumes=True)
    times = ("time_s", "epoch_time_s", "samples_per_s")
    for mine, theirs in ((watcher.steps, calm.steps), (watcher.epochs, calm.epochs)):
        plain = [{name: value for name, value in row.items() if name not in times} for row in mine]
        expected = [{name: value for name, value in row.items() if name not in times} for row in theirs]
        assert plain == expected[-len(plain) :]
    assert watcher.steps[0]["step"] > saved.step
    assert watcher.epochs[-1]["time_s"] > saved.facts["progress"]["epoch_time_s"]
    assert (result.model_sha256, result.metrics, result.steps) == (whole.model_sha256, whole.metrics, whole.steps)


def test_hits_in_a_row_are_kept(tmp_path: Path) -> None:
    """Two epochs in a row over the target end the run, also where it was interrupted between the two."""
    options = {"target_accuracy": 1e-9, "patience": 2, "epochs": 5}
    with pytest.raises(InterruptedError):
        one_run(tmp_path, fail_at=13, **options)
    _, _, result = one_run(tmp_path, resumes=True, **options)
    assert (result.status, result.epochs) == ("target reached", 2)


def test_the_first_loss_survives_and_older_checkpoints_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an exploded loss is judged by."""
    _, watcher, _ = one_run(tmp_path, log_every=1, max_steps=7, keep=3)
    for path in tmp_path.iterdir():
        if path.name != "step-000000003.safetensors":
            path.unlink()
    run, _, _ = one_run(None, max_steps=7)
    restored = Keeper(run, tmp_path, quiet, True).restore()
    assert restored is not None
    assert restored.first_loss == watcher.steps[0]["loss"]
    assert restored.last_loss == watcher.steps[2]["loss"]
    load = keeper.load_latest

    def older(folder: Path, tell: Any) -> Any:
        found = load(folder, tell)
        assert found is not None
        del found.facts["progress"]["first_loss"], found.facts["progress"]["last_loss"]
        found.facts["progress"]["result"]["of a later Paceline"] = 1
        return found

    monkeypatch.setattr(keeper, "load_latest", older)
    restored = Keeper(run, tmp_path, quiet, True).restore()
    assert restored is not None
    assert restored.first_loss is None


def test_what_is_in_it(tmp_path: Path) -> None:
    one_run(tmp_path, optimizer="adamw", virtual_workers=3)
    saved = load_latest(tmp_path, quiet)
    assert saved is not None
    names = set(saved.tensors)
    assert {"model.0.weight", "parts.values", "parts.counts", "optimizer.0.exp_avg", "optimizer.0.step"} <= names
    assert not any("running" in name for name in names), "running statistics are in the parts' table alone"
    assert saved.tensors["parts.values"].shape == (3, 16)
    assert saved.tensors["parts.counts"].tolist() == [[18]] * 3
    assert saved.facts["identity"]["options"]["virtual_workers"] == 3
    json.dumps(saved.facts)


@pytest.mark.parametrize("options", [{}, {"local_steps": 2, "local_after": 0.3, "virtual_workers": 3, "global_batch": 24}])
def test_averages_come_back(tmp_path: Path, options: dict[str, Any]) -> None:
    """Interrupted before and after a validation, which looks at the averages while training goes on with its own weights."""
    options = {"ema": 0.9, "reduce": "exact", "keep": 100, "checkpoint_every": "2", "epochs": 3, **options}
    calm, _, whole = one_run(tmp_path / "calm", **options)
    for fail_at in (6, 20):
        with pytest.raises(InterruptedError):
            one_run(tmp_path / "x", resumes=True, fail_at=fail_at, **options)
    run, _, result = one_run(tmp_path / "x", resumes=True, **options)
    assert (result.model_sha256, result.metrics) == (whole.model_sha256, whole.metrics)
    for one, other in zip(run.update.ema.tensors(), calm.update.ema.tensors(), strict=True):  # type: ignore[union-attr]
        assert one.equal(other)
    first, second = (load_latest(tmp_path / name, quiet) for name in ("calm", "x"))
    assert first is not None
    assert second is not None
    assert first.step == second.step
    assert sum(name.startswith("ema.") for name in first.tensors) == 6
    assert all(tensor.equal(second.tensors[name]) for name, tensor in first.tensors.items())


def test_records_from_before_there_was_an_option() -> None:
    options = {"seed": 0, "reduce": "fast"}
    check_unchanged(options, Config())
    before = {"options": options, "task": "t", "data": "", "model": ""}
    _check_identity(before, {**before, "options": {**options, "ema": 0.0, "local_steps": 0}})
    with pytest.raises(UsageError, match=r"--ema was 0\.0, is 0\.9"):
        _check_identity(before, {**before, "options": {**options, "ema": 0.9}})


def test_resumed_state_lies_as_the_weights_do(tmp_path: Path) -> None:
    """Channels-last weights, a file without layouts, and a fused optimizer that needs both alike."""
    options = {"model": "cnn:width=4", "max_steps": 6, "global_batch": 16, "checkpoint_every": "3", "reduce": "exact"}
    task, config = tasks.resolve("fashion-mnist-mini", options)
    with world() as here:
        runs = []
        for resumes in (False, True):
            run = build(task, config, here)
            keeper = Keeper(run, tmp_path, resumes=resumes)
            runs.append(fit(run, (), keeper))
            for parameter, state in run.update.optimizer.state.items():
                strides = zip(parameter.shape, parameter.stride(), state["momentum_buffer"].stride(), strict=True)
                assert all(size == 1 or ours == its for size, ours, its in strides)
            for path in tmp_path.glob("step-*6.safetensors"):
                path.unlink()  # so that the second goes on at step 3
    assert not run.model[3].weight.is_contiguous()
    assert runs[0].model_sha256 == runs[1].model_sha256


def test_another_torch_or_device_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InterruptedError):
        one_run(tmp_path, fail_at=8, reduce="exact")
    monkeypatch.setattr("torch.__version__", "9.9.9")
    _, watcher, _ = one_run(tmp_path, resumes=True, reduce="exact")
    assert any("this is torch 9.9.9 on CPU: bits may differ from here on" in note for note in watcher.notes)


def test_a_folder_that_cannot_be_written_costs_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    _, watcher, result = one_run(tmp_path / "file")
    assert result.status == "done"
    assert any("no checkpoint at step 3: cannot write checkpoints in" in note for note in watcher.notes)


@pytest.mark.parametrize(
    ("folder", "every", "said"),
    [
        ("x", "3", "a checkpoint was written; the same command with --resume continues"),
        ("file", "3", "no checkpoint was written"),
        ("x", "0", "no checkpoint was written"),
    ],
)
def test_a_stopped_run_says_whether_there_is_a_checkpoint(tmp_path: Path, folder: str, every: str, said: str) -> None:
    (tmp_path / "file").write_text("no folder")
    watch = SimpleNamespace(stop="SIGTERM", why_stop=lambda: "SIGTERM", mark=lambda step, stage: None)
    with pytest.raises(Stopped, match=f"^stopped by SIGTERM after step 1; {said}$"):
        one_run(tmp_path / folder, watch=watch, checkpoint_every=every)
    assert (tmp_path / "x" / "step-000000001.safetensors").exists() == said.startswith("a ")


def test_options_that_may_change_and_that_may_not() -> None:
    old = {"seed": 0, "epochs": 5, "base_lr": 0.05, "reduce": "fast", "parts_at_once": 1, "workers": 4, "virtual_workers": 4}
    check_unchanged(old, Config(workers=1, virtual_workers=4, parts_at_once=2, log_every=3))
    check_unchanged(old, Config(virtual_workers=4, epochs=6, max_steps=3))  # `describe_extension` judges the length
    for changed, said in (({"seed": 1}, "--seed was 0, is 1"), ({"base_lr": 0.3}, "--base-lr was 0.05, is 0.3")):
        with pytest.raises(UsageError, match=said):
            check_unchanged(old, Config(virtual_workers=4, **changed))
    with pytest.raises(UsageError, match="--parts-at-once was 1, is 2"):
        check_unchanged({**old, "reduce": "exact"}, Config(virtual_workers=4, reduce="exact", parts_at_once=2))


def test_the_fast_step_matters_to_exact_bits_alone() -> None:
    exact = {"reduce": "exact", "fast": "auto"}
    check_unchanged(exact, Config(reduce="exact", fast="on"))
    check_unchanged({"reduce": "fast", "fast": "on"}, Config(fast="off"))
    with pytest.raises(UsageError, match="--fast was auto, is off"):
        check_unchanged(exact, Config(reduce="exact", fast="off"))
    before = {"options": {"reduce": "exact"}, "task": "t", "data": "", "model": ""}  # made before there was the option
    _check_identity(before, {**before, "options": {"reduce": "exact", "fast": "off"}})
    with pytest.raises(UsageError, match="--fast was off, is auto"):
        _check_identity(before, {**before, "options": exact})


def test_a_part_of_one_sample_is_explained() -> None:
    with pytest.raises(UsageError, match="batch norm needs at least two samples per part"):
        one_run(None, virtual_workers=4, global_batch=4)
