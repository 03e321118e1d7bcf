"""`--set key=value` reaches the function that makes a task, converted to what its parameters expect, and stays with the run."""

import copy
import pickle
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import cli
from paceline.config import Config, make_config, merge_options, names_with
from paceline.errors import UsageError
from paceline.flags import to_flags
from paceline.options import Role
from paceline.settings import Settings, Text, fit_settings, make_settings, parse_setting, write_setting
from paceline.study.study import list_runs, parse_settings, read_study
from paceline.toml import read_recipe, to_toml
from paceline.training import run as training
from paceline.training import tasks

TASK = """
import torch
from paceline import Arrays, Task

calls = []

def task(width: int, noise=0.0, tag="x", deep: bool = False, extra=None):
    calls.append({"width": width, "noise": noise, "tag": tag, "deep": deep, "extra": extra})
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    return Task(
        name="my-task",
        model=lambda: torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Linear(width, 1)),
        train=lambda: Arrays((x, 3 * x + 1)),
        validation=lambda: Arrays((x, 3 * x + 1)),
        objective=lambda model, batch: {"loss": (model(batch[0]) - batch[1]).square().mean(1)},
    )
"""


@pytest.fixture
def my_task(runs: Path) -> Iterator[str]:
    """A task file with parameters, in the working folder."""
    path = list(sys.path)
    Path("my_task.py").write_text(TASK)
    yield "my_task.py"
    sys.path[:] = path
    sys.modules.pop("my_task", None)


def last_call() -> dict[str, Any]:
    return dict(sys.modules["my_task"].calls[-1])


def sample(width: int, scale=1, ratio: float = 0.5, tag: str = "x", deep=False, limit: int | None = None, free=None):
    """A function with parameters of all kinds."""


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("width=64", 64),
        ("scale=2", 2),
        ("scale=0.5", 0.5),
        ("ratio=1", 1.0),
        ("ratio=1e-3", 0.001),
        ("tag=64", "64"),
        ("tag=true", "true"),
        ("tag=", ""),
        ('tag="64"', "64"),
        ("tag='a b'", "a b"),
        ("tag='", "'"),
        ("tag=a=b", "a=b"),
        ("tag=a#b", "a#b"),
        ("deep=true", True),
        ("deep=False", False),
        ("deep=1", True),
        ("limit=3", 3),
        ("free=3", 3),
        ("free=3.5", 3.5),
        ("free=true", True),
        ("free=[1, 'a']", [1, "a"]),
        ("free={a = 1}", {"a": 1}),
        ("free=some words", "some words"),
        ("free=3#4", "3#4"),
        ("free=2024-01-01", "2024-01-01"),
        ("free=inf", "inf"),
        ("free=[[[", "[[["),
    ],
)
def test_text_is_converted_to_what_the_parameter_expects(given, value):
    key = given.partition("=")[0]
    found = fit_settings(sample, "task()", {"width": 1, **parse_setting(given)})[key]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("width=a", "--set width is 'a': it must be a whole number"),
        ("width=1.5", "--set width is '1.5': it must be a whole number"),
        ("ratio=nan", "--set ratio is 'nan': it must be a number"),
        ("scale=big", "--set scale is 'big': it must be a whole number"),
        ("deep=maybe", "--set deep is 'maybe': it must be true or false"),
        ("widht=3", "--set widht: task() has no such parameter; did you mean width?"),
        ("qqq=3", "--set qqq: task() has no such parameter; its parameters are width, scale, ratio, tag, deep, limit, free"),
        ("a b=3", "--set a b: a setting is the name of a parameter: letters, digits and _"),
    ],
)
def test_a_wrong_setting_is_one_line(given, words):
    with pytest.raises(UsageError) as caught:
        fit_settings(sample, "task()", {"width": 1, **make_settings(parse_setting(given))})
    assert str(caught.value) == words


def test_values_that_have_a_type_keep_it():
    found = fit_settings(sample, "task()", {"width": 3, "ratio": 1, "tag": "7", "scale": 0.5, "limit": 4, "free": (1, "2")})
    assert found == {"width": 3, "ratio": 1.0, "tag": "7", "scale": 0.5, "limit": 4, "free": [1, "2"]}
    assert isinstance(found["ratio"], float)
    with pytest.raises(UsageError, match="--set width is '3': it must be a whole number"):
        fit_settings(sample, "task()", {"width": "3"})
    with pytest.raises(UsageError, match="--set width is True: it must be a whole number"):
        fit_settings(sample, "task()", {"width": True})


def test_lists_and_empty_text_arrive_as_given():
    def task(widths: list[int], tag: str = "x", more: str | None = None) -> None:
        pass

    found = fit_settings(task, "task()", {**parse_setting("widths=[3, 4]"), **parse_setting("tag="), **parse_setting("more=a")})
    assert found == {"widths": [3, 4], "tag": "", "more": "a"}
    again = [parse_setting(write_setting(key, value)) for key, value in found.items()]
    assert fit_settings(task, "task()", {key: value for each in again for key, value in each.items()}) == found


def test_a_parameter_without_a_value_is_asked_for():
    with pytest.raises(UsageError, match=r"^task\(\) needs a value for width: add --set width=VALUE$"):
        fit_settings(sample, "task()", {})
    with pytest.raises(UsageError, match=r"^--set a: task\(\) has no such parameter; it has no parameters$"):
        fit_settings(lambda: None, "task()", {"a": 1})
    assert fit_settings(lambda **more: None, "task()", parse_setting("a-b=1")) == {"a_b": 1}


def test_annotations_may_be_text():
    space: dict[str, Any] = {}
    exec("from __future__ import annotations\ndef task(width: int, deep: Missing = 0): pass", space)
    assert fit_settings(space["task"], "task()", {"width": Text("3")}) == {"width": 3}


@pytest.mark.parametrize("value", [None, float("nan"), object(), {1: 2}, [None], "a\nb"])
def test_what_a_record_cannot_hold_is_refused(value):
    with pytest.raises(UsageError, match="--set key is"):
        Config(set={"key": value})


@pytest.mark.parametrize("value", ["width=3", 3, ["width"], {3: 4}, {"a b": 1}])
def test_settings_are_a_table(value):
    with pytest.raises(UsageError, match="--set "):
        make_config({"set": value})


def test_a_config_with_settings_is_frozen_hashable_and_can_be_copied():
    config = Config(set={"width": 3, "sizes": (1, 2)})
    assert config.set == {"width": 3, "sizes": [1, 2]}
    assert hash(config) == hash(Config(set={"width": 3, "sizes": [1, 2]}))
    assert config != Config(set={"width": 4, "sizes": [1, 2]})
    for again in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), replace(config, seed=0)):
        assert again == config
        assert again.given == {"set"}
    assert isinstance(asdict(config)["set"], dict)
    for change in (lambda s: s.update(a=1), lambda s: s.pop("width"), lambda s: s.__setitem__("width", 4), lambda s: s.clear()):
        with pytest.raises(TypeError, match="settings cannot be changed"):
            change(config.set)
    assert isinstance(Config().set, Settings)
    assert Config(set=None) == make_config({"set": None}) == Config()


def test_settings_are_part_of_what_a_run_is():
    assert "set" in names_with(Role.MODEL)


def test_settings_survive_toml_and_flags(tmp_path):
    values = {"width": 3, "noise": 0.5, "tag": "64", "deep": True, "extra": {"a b": [1, "é\U0001f600"]}}
    (tmp_path / "recipe.toml").write_text(to_toml(Config(set=values, epochs=3)), encoding="utf-8")
    assert make_config(read_recipe(str(tmp_path / "recipe.toml"))).set == values
    assert "[set]" not in to_toml(Config())
    flags = to_flags({"set": {**values, "typed": Text("64")}})
    assert "--set=typed=64" in flags, "text from the command line stays as it was typed"
    assert '--set=tag="64"' in flags
    _, options = cli._parse(["train", "x.py", *flags])
    assert fit_settings(lambda **more: None, "task()", options["set"]) == {**values, "typed": 64}
    assert write_setting("a", [1, True]) == "a=[1, true]"


def test_settings_of_layers_are_merged_key_by_key():
    merged = merge_options({"set": {"a": 1, "b": 1}}, {"epochs": 3}, {"set": {"b": 2}})
    assert merged == {"set": {"a": 1, "b": 2}, "epochs": 3}
    assert make_config({"set": {"a": 1}}, {"set": {"b": 2}}).set == {"a": 1, "b": 2}


def test_set_reaches_the_task_and_is_recorded(my_task, runs, capsys):
    assert cli.run(["train", my_task, "--set", "width=3", "--set", "tag=64", "--set", "extra=7", "--epochs=1", "--name=a"]) == 0
    expected = {"width": 3, "tag": "64", "extra": 7}
    assert last_call() == {"noise": 0.0, "deep": False, **expected}
    assert read_recipe(str(runs / "a" / "config.toml"))["set"] == expected
    assert 'width=3 tag="64" extra=7' in capsys.readouterr().out, "the contract says it"
    recipe = ["--recipe", str(runs / "a" / "config.toml")]
    assert cli.run(["train", my_task, *recipe, "--set", "noise=1", "--name=b", "--workers=1"]) == 0
    assert last_call() == {"deep": False, "noise": 1.0, **expected}


def test_python_passes_settings_too(my_task, runs):
    paceline.train(my_task, set={"width": 4, "deep": True}, epochs=1, name="a")
    assert last_call()["width"] == 4
    assert last_call()["deep"] is True


def test_a_resumed_run_keeps_its_settings_and_refuses_others(my_task, runs):
    with pytest.raises(KeyboardInterrupt):
        _interrupted(my_task)
    assert (runs / "a" / "config.toml").exists()
    with pytest.raises(UsageError, match=r"--set was \{'width': 4, 'tag': 'y'\}, is \{'width': 5, 'tag': 'y'\}"):
        paceline.train(my_task, resume="a", set={"width": 5})
    paceline.train(my_task, resume="a", set={"width": 4})
    assert (last_call()["width"], last_call()["tag"]) == (4, "y"), "what is not given again is taken from the record"


def _interrupted(task: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.Printer, "epoch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        paceline.train(task, set={"width": 4, "tag": "y"}, epochs=2, name="a", checkpoint_every="1")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("my_task.py",), "task() in my_task.py needs a value for width: add --set width=VALUE"),
        (("my_task.py", "--set", "widht=3"), "--set widht: task() in my_task.py has no such parameter; did you mean width?"),
        (("my_task.py", "--set", "width"), "--set width: it must be key=value, such as --set width=64"),
        (("fashion-mnist-mini", "--set", "width=3"), "--set width: task fashion-mnist-mini is built in; --set is for"),
    ],
)
def test_a_mistake_is_one_line(my_task, capsys, argv, words):
    assert cli.run(["train", *argv]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_built_in_task_refuses_settings_before_workers_start(monkeypatch):
    with pytest.raises(UsageError, match="fashion-mnist-mini is built in"):
        tasks.check("fashion-mnist-mini", {"set": {"width": 3}})


def test_a_task_that_is_already_made_refuses_settings(my_task):
    made, _ = tasks.resolve(my_task, {"set": {"width": 3}})
    with pytest.raises(UsageError, match="the Task my-task is already made"):
        tasks.resolve(made, {"set": {"width": 3}})
    with pytest.raises(UsageError, match="'set' cannot be one of the task's defaults"):
        tasks.resolve(replace(made, defaults={"set": {"width": 3}}), {})


def test_arms_of_a_study_have_settings(my_task):
    arms = '[arms.a]\nset = {width = 3}\n[arms.b.set]\nwidth = 5\ntag = "y"\n'
    Path("s.toml").write_text(f'task = "my_task.py"\nseeds = 1\n[options]\nepochs = 1\n{arms}')
    found = list_runs(read_study(Path("s.toml"), settings=["set.tag=64", "epochs=2"]))
    assert [run.options["set"] for run in found] == [{"width": 3, "tag": "64"}, {"width": 5, "tag": "64"}]
    assert [type(run.options["set"]["tag"]) for run in found] == [str, str], "converted: they travel as JSON"
    assert [run.resolved["set"] for run in found] == [run.options["set"] for run in found]
    assert parse_settings(["set.a=1", "set.b=2"]) == {"set": {"a": "1", "b": "2"}}
