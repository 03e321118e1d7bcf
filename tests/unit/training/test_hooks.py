"""Hooks: when each is called and with what, what it must not do, and what a mistake in one says."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness.training import ALONE, blobs, train_in
from paceline import Hooks, Moment
from paceline.errors import PacelineError, UsageError
from paceline.records import read_metrics, read_result
from paceline.training.hooks import FUNCTIONS
from paceline.training.run import train
from paceline.training.task import Task

EXACT = {"reduce": "exact", "virtual_workers": 2}


def clamp(moment: Moment) -> None:
    """A hook that changes the model in place."""
    for parameter in moment.model.parameters():
        parameter.clamp_(-0.25, 0.25)


def listen(calls: list[tuple[str, Moment]], **more: Any) -> Hooks:
    """Hooks that remember every call."""
    return Hooks(**{name: lambda moment, name=name: calls.append((name, moment)) for name in FUNCTIONS}, **more)


def test_each_hook_is_called_when_it_should_be(runs: Path) -> None:
    calls: list[tuple[str, Moment]] = []
    result = train(blobs(hooks=listen(calls)), epochs=2, checkpoint_every="5", log_every=4, name="x")
    steps = [("on_step", step) for step in range(1, 10)]
    first = [*steps[:5], ("on_checkpoint", 5), *steps[5:], ("on_validation", 9), ("on_epoch", 9)]
    steps = [("on_step", step) for step in range(10, 19)]
    second = [steps[0], ("on_checkpoint", 10), *steps[1:6], ("on_checkpoint", 15), *steps[6:]]
    last = [("on_validation", 18), ("on_checkpoint", 18), ("on_epoch", 18), ("on_end", 18)]
    assert [(name, moment.step) for name, moment in calls] == [("on_start", 0), *first, *second, *last]
    assert [moment.epoch for name, moment in calls if name in ("on_start", "on_epoch", "on_end")] == [0, 1, 2, 2]
    assert {(moment.rank, moment.workers, moment.record) for _, moment in calls} == {(0, 1, Path("runs/x"))}
    assert calls[-1][1].result == result


def test_what_a_hook_is_told(runs: Path) -> None:
    calls: list[tuple[str, Moment]] = []
    result = train(blobs(hooks=listen(calls)), epochs=1, log_every=4, name="x")
    at = dict(calls)  # the last call of each
    rows = [row for row in read_metrics(runs / "x") if row["kind"] in ("step", "epoch", "health")]
    told = [row for _, moment in calls for row in moment.rows]
    assert [{**row, "kind": row["kind"]} for row in told] == rows, "each row once, as in metrics.jsonl"
    assert set(at["on_step"].metrics) == {"loss", "accuracy"}
    assert at["on_step"].metrics["loss"] == pytest.approx(next(row for row in rows if row["step"] == 9)["loss"])
    assert at["on_step"].lr == rows[2]["lr"]
    assert at["on_validation"].metrics == result.metrics == at["on_end"].metrics
    assert set(at["on_epoch"].metrics) == {"train_loss", "train_accuracy", "val_loss", "val_accuracy"}
    assert at["on_checkpoint"].checkpoint == Path("runs/x/checkpoints/step-000000009.safetensors")


def test_a_checkpoint_is_on_disk_when_its_hook_is_called(runs: Path) -> None:
    seen: list[bool] = []
    hooks = Hooks(on_checkpoint=lambda moment: seen.append(bool(moment.checkpoint and moment.checkpoint.stat().st_size)))
    train(blobs(hooks=hooks), epochs=1, checkpoint_every="2")
    assert seen == [True] * 5
    train(blobs(hooks=hooks), epochs=1, checkpoint_every="0")
    assert len(seen) == 5, "no checkpoint, no call"


def test_the_record_is_complete_at_the_end(runs: Path) -> None:
    seen: list[Any] = []

    def look(moment: Moment) -> None:
        assert moment.record is not None
        seen.append((read_result(moment.record)["status"], (moment.record / "model.safetensors").exists()))

    train(blobs(hooks=Hooks(on_end=look)), epochs=1)
    assert seen == [("done", True)]


def test_averaged_weights_are_in_the_model_for_validation_only() -> None:
    seen: dict[str, list[torch.Tensor]] = {"on_validation": [], "on_epoch": []}

    def look(name: str) -> Any:
        return lambda moment: seen[name].append(next(moment.model.parameters()).clone())

    task = blobs(hooks=Hooks(on_validation=look("on_validation"), on_epoch=look("on_epoch")))
    trained = train_in(ALONE, task, {"epochs": 2, "ema": 0.9, **EXACT})
    assert not any(torch.equal(*pair) for pair in zip(seen["on_validation"], seen["on_epoch"], strict=True))
    final = torch.from_numpy(next(iter(trained.weights.values())))
    assert torch.equal(final, seen["on_validation"][-1]), "the averaged weights are the result"


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda model: next(model.parameters()).mul_(2), "on_step"),
        (lambda model: next(model.parameters()).data.mul_(2), "on_step"),
        (lambda model: next(model.parameters()).data.mul_(2), "on_epoch"),
        (lambda model: next(model.parameters()).data.mul_(2), "on_validation"),
        (lambda model: model(torch.zeros(4, 5)), "on_epoch"),  # moves batch norm's statistics
        (lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(8, 5))), "on_checkpoint"),
    ],
)
def test_exact_mode_refuses_a_change_of_the_model(tmp_path: Path, change: Any, where: str) -> None:
    def my_hook(moment: Moment) -> None:
        moment.model.train()
        change(moment.model)

    task = blobs(norm=True, hooks=Hooks(**{where: my_hook}))
    with pytest.raises(UsageError, match=rf"^hook {where} \(my_hook\) changed the model \(.+\), which exact mode"):
        train_in(ALONE, task, {"epochs": 1, "checkpoint_every": "0" if where != "on_checkpoint" else "3", **EXACT}, tmp_path)


def test_a_change_in_a_late_step_is_found_without_looking_at_the_bits() -> None:
    def my_hook(moment: Moment) -> None:
        if moment.step == 7:  # bits are compared around steps 1 to 3
            next(moment.model.parameters()).mul_(2)

    with pytest.raises(UsageError, match=r"^hook on_step \(my_hook\) changed the model \(0.weight\)"):
        train_in(ALONE, blobs(hooks=Hooks(on_step=my_hook)), {"epochs": 1, **EXACT})


def test_an_extended_run_does_not_repeat_a_change(runs: Path) -> None:
    hooks = Hooks(on_epoch=lambda moment: next(moment.model.parameters()).mul_(0.5), changes_model=True, every_rank=True)
    for options in ({}, {"ema": 0.9}):
        constant = {**EXACT, "schedule": "constant", **options}
        calm = train(blobs(hooks=hooks), epochs=3, **constant)
        first = train(blobs(hooks=hooks), epochs=2, **constant)
        assert train(blobs(hooks=hooks), resume=first.record, epochs=3).model_sha256 == calm.model_sha256


def test_a_hook_that_says_so_may_change_the_model() -> None:
    plain = train_in(ALONE, blobs(), {"epochs": 2, **EXACT})
    for name in ("on_step", "on_epoch"):
        hooks = Hooks(**{name: clamp}, changes_model=True, every_rank=True)
        changed = train_in(ALONE, blobs(hooks=hooks), {"epochs": 2, **EXACT})
        assert changed.result.model_sha256 != plain.result.model_sha256
        assert max(float(np.abs(value).max()) for value in changed.weights.values()) <= 0.25


def test_a_change_is_in_place_and_in_the_right_hook() -> None:
    def replace(moment: Moment) -> None:
        moment.model[0].weight = nn.Parameter(torch.zeros(8, 5))  # type: ignore[index]

    with pytest.raises(UsageError, match=r"hook on_epoch \(replace\) replaced tensors of the model: change weights in place"):
        train_in(ALONE, blobs(hooks=Hooks(on_epoch=replace, changes_model=True, every_rank=True)), {"epochs": 1})
    hooks = Hooks(on_validation=clamp, changes_model=True, every_rank=True)
    with pytest.raises(UsageError, match=r"only on_step and on_epoch can, with changes_model=True$"):
        train_in(ALONE, blobs(hooks=hooks), {"epochs": 1, **EXACT})
    hooks = Hooks(on_step=clamp, changes_model=True, every_rank=True)
    with pytest.raises(UsageError, match="cannot be combined with --local-steps"):
        train_in(ALONE, blobs(hooks=hooks), {"virtual_workers": 2, "local_steps": 2})


def test_a_hook_that_looks_changes_nothing() -> None:
    """Random numbers of every kind, evaluation mode, a pass through the model: the bits stay."""

    def look(moment: Moment) -> None:
        torch.rand(3), np.random.rand(3), random.random()
        torch.manual_seed(moment.step), np.random.seed(1), random.seed(1)
        assert not moment.model.eval()(torch.zeros(2, 5)).requires_grad

    task = {"norm": True, "dropout": 0.3}
    plain = train_in(ALONE, blobs(**task), {"epochs": 2, **EXACT})
    hooks = Hooks(**dict.fromkeys(("on_start", "on_step", "on_validation", "on_epoch"), look))
    assert train_in(ALONE, blobs(**task, hooks=hooks), {"epochs": 2, **EXACT}).result.model_sha256 == plain.result.model_sha256


def test_an_error_in_a_hook_ends_the_run_with_the_users_line(runs: Path) -> None:
    ends: list[str] = []

    def fail(moment: Moment) -> None:
        raise ZeroDivisionError("a mistake of mine")

    def end(moment: Moment) -> None:
        assert moment.result is not None
        ends.append(moment.result.status)
        raise LookupError("and another")

    with pytest.raises(ZeroDivisionError):
        train(blobs(hooks=[Hooks(on_epoch=fail), Hooks(on_end=end)]), epochs=3, name="x")
    result = read_result(runs / "x")
    assert (result["status"], result["why"], result["epochs"]) == ("failed", "ZeroDivisionError: a mistake of mine", 1)
    assert "test_hooks.py" in result["where"]
    assert "in fail" in result["where"]
    assert ends == ["failed"], "on_end is called however a run ends"


@pytest.mark.parametrize("name", ["on_step", "on_end"])
def test_a_hook_cannot_end_the_program(runs: Path, name: str) -> None:
    with pytest.raises(PacelineError, match=r"sys.exit\(0\) was called"):
        train(blobs(hooks=Hooks(**{name: lambda moment: exit(0)})), epochs=1)


async def later(moment: Moment) -> None: ...


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "Hooks has no function: give at least one of on_start, on_step"),
        ({"on_batch": print}, "unknown field of Hooks 'on_batch'"),
        ({"on_train_epoch_end": print}, "Hooks has no field 'on_train_epoch_end': did you mean 'on_epoch'?"),
        ({"on_epoch": 3}, "on_epoch is an int: it must be a function; write def on_epoch"),
        ({"on_step": lambda: 0}, "cannot be called with one argument, the moment"),
        ({"on_step": lambda trainer, module: 0}, "cannot be called with one argument, the moment"),
        ({"on_end": later}, "on_end is an async function"),
        ({"on_end": print, "every_rank": 1}, "every_rank is an int: it must be True or False"),
        ({"on_end": print, "changes_model": True}, "changes_model=True needs every_rank=True"),
    ],
)
def test_mistakes_in_hooks_are_one_line(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Hooks(**fields)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [print, Hooks, "on_epoch", [print], {"on_epoch": print}, None])
def test_a_task_takes_hooks_only(given: Any) -> None:
    with pytest.raises(UsageError, match=r"task blobs: hooks .*give Hooks\(on_epoch=...\), or a list of them"):
        blobs(hooks=given)


def test_a_task_without_hooks_has_none() -> None:
    assert blobs().hooks == ()
    one = Hooks(on_end=print)
    assert blobs(hooks=one).hooks == blobs(hooks=[one]).hooks == (one,)
    assert isinstance(blobs(hooks=one), Task)


def test_the_documented_hooks_work(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[3] / "docs" / "hooks.md"
    first, second = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    Path("hooked_task.py").write_text(first)
    assert train("hooked_task.py", epochs=2, name="x").status == "done"
    out = capsys.readouterr().out
    assert "epoch 2: accuracy 0." in out
    assert "upload runs/x/model.safetensors" in out
    names: dict[str, Any] = {"Hooks": Hooks, "Moment": Moment}
    exec(second, names)
    assert train_in(ALONE, blobs(hooks=names["hooks"]), {"epochs": 1, **EXACT}).result.status == "done"
