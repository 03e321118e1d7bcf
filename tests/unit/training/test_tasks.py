"""From a name to a Task and its Config: built-in names, files, modules, and what does not fit together."""

import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.training import blobs
from paceline.config import Config
from paceline.data.augment import Images
from paceline.data.loaders import Arrays
from paceline.errors import UsageError
from paceline.training import tasks
from paceline.training.task import Task, classify

TASK_FILE = """
import torch, paceline
from torch import nn

def task():
    data = paceline.Arrays((torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)))
    return paceline.Task(name="mine", train=lambda: data, validation=lambda: data, objective=paceline.classify(),
                         model=lambda: nn.Linear(3, 2), defaults={"epochs": 9, "base_lr": 0.5})

def other():
    return paceline.Task(name="other", train=task, validation=task, objective=paceline.classify(), classes=2)
"""


@pytest.fixture
def folder(runs: Path) -> Iterator[Path]:
    """An empty folder to write task files to; what they import is forgotten."""
    path = list(sys.path)
    modules = dict(sys.modules)
    yield runs.parent
    sys.path[:] = path
    ours = ("my_task", "neighbor_task", "package_task")
    for name in [name for name in sys.modules if name.partition(".")[0] in ours or name.startswith("paceline_task_")]:
        del sys.modules[name]
    sys.modules.update(modules)


def make_task(**fields) -> Task:
    data = Arrays((torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)))
    usual = {"name": "mine", "objective": classify(), "model": lambda: nn.Linear(3, 2)}
    return Task(train=lambda: data, validation=lambda: data, **{**usual, **fields})


def test_built_in_defaults_lie_below_options():
    task, config = tasks.resolve("fashion-mnist-mini", {"epochs": "3"})
    assert (task.name, task.classes, task.model) == ("fashion-mnist-mini", 10, None)
    assert (config.model, config.flip, config.epochs) == ("cnn", True, 3)
    _, config = tasks.resolve("fashion-mnist-mini", {"model": "linear", "flip": False})
    assert (config.model, config.flip) == ("linear", False)


def test_built_in_data_is_the_mini_set_and_read_once(monkeypatch):
    loads = []
    real = tasks.fashion_mnist.load
    monkeypatch.setattr(tasks.fashion_mnist, "load", lambda *args: loads.append(args) or real(*args))
    task, _ = tasks.resolve("fashion-mnist-mini", {})
    assert not loads, "resolving a task must not read its data"
    train, validation = task.train(), task.validation()
    assert len(loads) == 1
    assert train.tensors[0].shape == (6000, 1, 28, 28)
    assert validation.tensors[0].shape == (1000, 1, 28, 28)
    assert "fashion-mnist-mini" in train.about


def test_image_options_reach_the_images():
    options = {"crop": 2, "flip": False, "erase": 0.25, "seed": 7}
    task, _ = tasks.resolve("fashion-mnist", options)
    assert task.prepare == Images(mean=0.2860, deviation=0.3530, crop=2, flip=False, erase=0.25, seed=7)
    task, _ = tasks.resolve("fashion-mnist", {"pixels": "unit"})
    assert task.prepare == Images(mean=0.0, deviation=1.0, flip=True)


def test_standard_pixels_have_mean_0_and_deviation_1():
    task, _ = tasks.resolve("fashion-mnist-mini", {"flip": False})
    data = task.train()
    images, _ = task.prepare(data.tensors, torch.arange(len(data)), None)
    assert images.mean().abs() < 0.02
    assert abs(images.std() - 1) < 0.02


def test_label_smoothing_reaches_the_loss_in_training_alone():
    model, batch = nn.Identity(), (torch.tensor([[9.0, 0.0]]), torch.tensor([0]))
    smooth, plain = tasks.resolve("fashion-mnist", {"label_smoothing": 0.2})[0].objective, classify()
    assert smooth(model.train(), batch)["loss"] > plain(model, batch)["loss"] + 0.5
    assert smooth(model.eval(), batch)["loss"] == plain(model, batch)["loss"]
    assert plain(model, batch)["accuracy"].tolist() == [1.0]


def test_a_file(folder):
    (folder / "my_task.py").write_text(TASK_FILE)
    task, config = tasks.resolve("my_task.py", {"base_lr": 0.25})
    assert (task.name, config.epochs, config.base_lr) == ("mine", 9, 0.25)
    task, _ = tasks.resolve("my_task.py:other", {})
    assert task.name == "other"


def test_a_file_may_import_files_next_to_it(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "neighbor_task.py").write_text(TASK_FILE)
    (folder / "sub" / "my_task.py").write_text("from neighbor_task import task\n")
    assert tasks.resolve("sub/my_task.py", {})[0].name == "mine"


def test_a_module(folder):
    (folder / "package_task").mkdir()
    (folder / "package_task" / "inner.py").write_text(TASK_FILE)
    assert tasks.resolve("package_task.inner:task", {})[0].name == "mine"
    with pytest.raises(UsageError, match=r"package_task.inner has no function tsk\(\)"):
        tasks.resolve("package_task.inner:tsk", {})
    with pytest.raises(UsageError, match="raised ModuleNotFoundError"):
        tasks.resolve("package_task.outer:task", {})


def test_a_broken_file_leaves_nothing_behind(folder):
    (folder / "my_task.py").write_text("broken")
    for _ in range(2):
        with pytest.raises(UsageError, match="raised NameError: name 'broken' is not defined"):
            tasks.resolve("my_task.py", {})
    assert "my_task" not in sys.modules


def test_two_files_of_one_name_are_two_tasks(folder):
    for sub in ("a", "b"):
        (folder / sub).mkdir()
        (folder / sub / "my_task.py").write_text(TASK_FILE.replace('"mine"', f'"{sub}"'))
    assert [tasks.resolve(f"{sub}/my_task.py", {})[0].name for sub in ("a", "b")] == ["a", "b"]


@pytest.mark.parametrize("name", ["queue", "tempfile", "torch", "sched"])
def test_a_file_named_like_another_module_replaces_nothing(folder, name):
    """torch's DataLoader imports queue and tempfile later; sched is a standard module that nobody has loaded."""
    before = sys.modules.get(name)
    (folder / f"{name}.py").write_text(f"{TASK_FILE}\nclass Mine:\n    pass\n\ndef mine():\n    return Mine()\n")
    assert tasks.resolve(f"{name}.py", {})[0].name == "mine"
    assert sys.modules.get(name) is before
    made = tasks._import(f"{name}.py").mine()
    assert type(pickle.loads(pickle.dumps(made))) is type(made)  # loader processes find the class by its module's name
    (folder / "sub").mkdir()
    (folder / "sub" / f"{name}.py").write_text("broken")
    with pytest.raises(UsageError, match="raised NameError: name 'broken' is not defined"):
        tasks.resolve(f"sub/{name}.py", {})
    assert sys.modules.get(name) is before


def test_an_unknown_task_names_the_nearest_and_the_other_ways(folder):
    with pytest.raises(UsageError, match=r"did you mean 'fashion-mnist-mini'\? \(or a file my_task.py"):
        tasks.resolve("fashion-mnist-mimi", {})


@pytest.mark.parametrize("key", ["workers", "nodes", "node_id", "rendezvous", "backend", "runs_dir", "name"])
def test_a_tasks_defaults_say_nothing_about_where_it_runs(key):
    with pytest.raises(UsageError, match=f"task mine: '{key}' says where a run happens"):
        tasks.configure(make_task(defaults={key: 1}), {})


def test_a_tasks_unknown_default_names_the_nearest():
    with pytest.raises(UsageError, match="unknown key 'epoch': did you mean 'epochs'"):
        tasks.configure(make_task(defaults={"epoch": 1}), {})


@pytest.mark.parametrize(
    ("key", "value", "default"),
    [
        ("crop", "2", "0"),
        ("flip", True, False),
        ("erase", 0.5, "0.0"),
        ("pixels", "unit", "standard"),
        ("label_smoothing", "0.1", 0),
        ("data_dir", "x", ""),
    ],
)
def test_image_options_are_for_built_in_tasks(key, value, default):
    with pytest.raises(UsageError, match=f"--{key.replace('_', '-')} is for built-in image tasks; mine prepares its own"):
        tasks.configure(make_task(), {key: value})
    tasks.configure(make_task(), {key: default})  # as a whole Config passed on as flags does


def test_a_task_has_a_model_or_takes_one():
    with pytest.raises(UsageError, match="--model cnn: task mine has its own model"):
        tasks.configure(make_task(), {"model": "cnn"})
    with pytest.raises(UsageError, match="task mine has neither a model nor classes"):
        tasks.configure(make_task(model=None), {})
    assert tasks.configure(make_task(model=None, classes=2), {"model": "linear"}).model == "linear"


def test_a_tasks_folder_comes_between_the_standard_library_and_packages(folder):
    """A statistics.py next to the task must not replace Python's, which is imported later; a package of the same name may."""
    (folder / "my_task.py").write_text(TASK_FILE)
    tasks.resolve("my_task.py", {})
    (place,) = (i for i, path in enumerate(sys.path) if path == str(folder))
    assert place > sys.path.index(str(Path(os.__file__).parent)), sys.path
    assert place < sys.path.index(str(Path(torch.__file__).parent.parent)), sys.path


def test_check_looks_without_touching(folder):
    (folder / "my_task.py").write_text("raise SystemExit('the file was run')")
    tasks.check("my_task.py", {"model": "resnet:depth=20", "optimizer": "adamw"})
    tasks.check("fashion-mnist", {})
    tasks.check("module:function", {})
    for name, options, words in (
        ("nothing.py", {}, "task file nothing.py does not exist"),
        ("fashion-mnst", {}, "did you mean 'fashion-mnist'"),
        ("fashion-mnist", {"optimizer": "sdg"}, "did you mean 'sgd'"),
        ("fashion-mnist", {"model": "cn"}, "did you mean 'cnn'"),
        ("fashion-mnist", {"epochs": 0}, "--epochs is 0"),
    ):
        with pytest.raises(UsageError, match=words):
            tasks.check(name, options)


def test_a_config_is_judged_with_the_tasks_defaults() -> None:
    """Alone, a warm-up would not fit Config's own one-cycle schedule."""
    given = Config(warmup_epochs=1.0)
    task = blobs()
    task = replace(task, defaults={**task.defaults, "schedule": "cosine"})
    _, config = tasks.resolve(task, {name: getattr(given, name) for name in given.given})
    assert (config.schedule, config.warmup_epochs) == ("cosine", 1.0)
