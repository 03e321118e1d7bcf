"""The command line: a mistake is one line and exit code 2, a failure one line and 1, and help answers at once."""

import dataclasses
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from paceline import cli, config, toml
from paceline.config import Config, flag, names_with
from paceline.data import fashion_mnist
from paceline.dist.messages import claim_first
from paceline.doctor import verb
from paceline.errors import PacelineError, SampleError, UsageError, refuse_exit
from paceline.options import Role
from paceline.records import read_result
from paceline.training import run as training

QUICK = ("--model", "linear", "--train-samples", "64", "--max-steps", "1")


MINI = ("train", "fashion-mnist-mini", *QUICK)


@pytest.fixture(autouse=True)
def own_process(runs: Path) -> Iterator[None]:
    """As if each call had a process of its own: task modules and the process group of a failed run are gone after it."""
    path = list(sys.path)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.path[:] = path
    sys.modules.pop("my_task", None)


@pytest.fixture
def mistake(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must fail with one line on stderr; returns the line."""

    def call(*argv: str, code: int = 2) -> str:
        assert cli.run(argv) == code
        out, err = capsys.readouterr()
        assert err.endswith("\n")
        assert len(err.splitlines()) == 1, err
        assert err.startswith("paceline: ")
        assert "Traceback" not in out + err
        return err.rstrip()

    return call


def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr(training, "launch", refuse)


OPTIONS = frozenset(field.name for field in dataclasses.fields(Config))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("trian", "x"), "unknown verb 'trian': did you mean 'train'?"),
        (("docter",), "unknown verb 'docter': did you mean 'doctor'?"),
        (("train", "fashion-mnist-mini", "--epoch", "3"), "unknown flag --epoch: did you mean --epochs?"),
        (("train", "fashion-mnist-mini", "--bse-lr=3"), "unknown flag --bse-lr: did you mean --base-lr?"),
        (("train", "fashion-mnist-mini", "more"), "unknown argument more: see paceline train --help-all"),
        (("train", "x", "--batch-schedule", "0:64", "0.5:128"), 'argument 0.5:128: put a schedule in quotes: "0:64 1:128"'),
        (("train", "fashion-mnst"), "unknown task 'fashion-mnst': did you mean 'fashion-mnist'?"),
        (
            ("train", "fashion-mnist-mini", "--schedule", "cosin"),
            "unknown value for --schedule 'cosin': did you mean 'cosine'?",
        ),
        (("train", "fashion-mnist-mini", "--workers"), "argument --workers: expected one argument"),
        (("train", "fashion-mnist-mini", "--workers", "two"), "--workers is 'two': it must be a whole number"),
        (("train", "fashion-mnist-mini", "--workers", "0"), "--workers is 0: it must be at least 1"),
        (("train", "fashion-mnist-mini", "--name", "../x"), "--name is '../x': it must be a plain name"),
        (("train", ""), "unknown task ''"),
        (("train", "\x1b[2J\n.py"), "task file \\x1b[2J\\n.py does not exist"),
        (("train", "fashion-mnist-mini", "--name=-x"), "--name is '-x': it must be a plain name"),
        (("train", "fashion-mnist-mini", "--name", "a\nb"), "--name is 'a\\nb': it must not contain control characters"),
        (("train", "fashion-mnist-mini", "--tracker", "\x1b[2J"), "unknown value for --tracker '\\x1b[2J'"),
        (("train", "fashion-mnist-mini", "--\x1b[2J"), "unknown flag --\\x1b[2J"),
        (("train", "fashion-mnist-mini", "--recipe", "a\x1b.toml"), "cannot read recipe a\\x1b.toml: No such file"),
        (("train", "fashion-mnist-mini", "--resume="), "--resume= has no value"),
        (
            ("train", "fashion-mnist-mini", "--train-samples", "6001"),
            "--train-samples is 6001: task fashion-mnist-mini has",
        ),
        (("train", "fashion-mnist-mini", "--crop", "29"), "--crop is 29: images of fashion-mnist-mini are 28 x 28 pixels"),
        (("train", "fashion-mnist-mini", "--subset", "rndom", "--train-samples", "9"), "did you mean 'random'?"),
        (("learning-curv", "x"), "unknown verb 'learning-curv': did you mean 'learning-curve'?"),
        (("learning-curve",), "the following arguments are required: TASK"),
        (("train",), "the following arguments are required: TASK"),
        (("data", "lst"), "invalid choice: 'lst'"),
        (("data", "verify", "fashion-mnist-mni"), "did you mean 'fashion-mnist-mini'?"),
        (("data", "list", "--dat-dir", "x"), "unknown flag --dat-dir: did you mean --data-dir?"),
        (("doctor", "--verbos"), "unknown flag --verbos: did you mean --verbose?"),
        (("stdy", "x.toml"), "unknown verb 'stdy': did you mean 'study'?"),
        (("study",), "the following arguments are required: FILE"),
        (("study", "x.toml", "--mni"), "unknown flag --mni: did you mean --mini?"),
        (("toy",), "unknown verb 'toy': did you mean 'toys'?"),
        (("toys", "--seds", "3"), "unknown flag --seds: did you mean --seeds?"),
        (("toys", "--toy", "lines"), "invalid choice: 'lines'"),
        (("rehears", "x"), "unknown verb 'rehears': did you mean 'rehearse'?"),
        (("rehearse",), "the following arguments are required: TASK"),
        (("rehearse", "fashion-mnist-mini", "--epoch", "3"), "unknown flag --epoch: did you mean --epochs?"),
    ],
)
def test_a_mistake_is_one_line(mistake, argv, words):
    assert words in mistake(*argv)


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "resnett"), "unknown model 'resnett': did you mean 'resnet'?"),
        (("--model", "resnet:dpeth=20"), "unknown key of model resnet 'dpeth': did you mean 'depth'?"),
        (("--model", "resnet:depth=deep"), "model resnet: depth is 'deep'"),
        (("--optimizer", "sgdd"), "unknown optimizer 'sgdd': did you mean 'sgd'?"),
    ],
)
def test_an_unknown_part_is_one_line_for_any_number_of_workers(mistake, runs, monkeypatch, flags, words, workers):
    no_workers(monkeypatch)
    assert words in mistake("train", "fashion-mnist-mini", *flags, "--workers", workers)
    assert not runs.exists()


@pytest.mark.parametrize(
    "argv",
    [
        ("train", "fashion-mnist-mini", "--global-batch", "100", "--workers", "3"),
        ("train", "fashion-mnst", "--workers", "2"),
        ("train", "my_task.py", "--workers", "2"),
        ("train", "fashion-mnist-mini", "--workers", "2", "--epochs", "0"),
    ],
)
def test_what_can_be_known_wrong_is_refused_before_workers_start(mistake, runs, monkeypatch, argv):
    no_workers(monkeypatch)
    mistake(*argv)
    assert not runs.exists()


def test_a_batch_that_does_not_divide_names_those_that_do(mistake, monkeypatch):
    no_workers(monkeypatch)
    assert "use 99 or 102" in mistake("train", "fashion-mnist-mini", "--workers", "3", "--global-batch", "100")


def test_recipe_mistakes(mistake, tmp_path):
    assert "cannot read recipe missing.toml: No such file" in mistake(*MINI, "--recipe", "missing.toml")
    Path("broken.toml").write_text("epochs = = 3")
    assert "recipe broken.toml is not valid TOML" in mistake(*MINI, "--recipe", "broken.toml")
    Path("unknown.toml").write_text("epoch = 3")
    assert "recipe unknown.toml: unknown key 'epoch': did you mean 'epochs'?" in mistake(*MINI, "--recipe", "unknown.toml")
    Path("wrong.toml").write_text("epochs = 1.5")
    assert "--epochs is 1.5: it must be a whole number" in mistake(*MINI, "--recipe", "wrong.toml")


def test_a_recipe_by_name(mistake, runs, monkeypatch):
    assert "unknown recipe 'no-such-recipe'" in mistake(*MINI, "--recipe", "no-such-recipe")
    Path("packaged").mkdir()
    for name in ("batch-64", "batch-8192"):
        Path("packaged", f"{name}.toml").write_text("global_batch = 64\nepochs = 1\n")
    packaged = {name: Path("packaged", f"{name}.toml") for name in ("batch-64", "batch-8192")}
    monkeypatch.setattr(toml, "packaged_recipes", lambda: packaged)
    line = mistake(*MINI, "--recipe", "batch-8129")
    assert "unknown recipe 'batch-8129': did you mean 'batch-8192'? (packaged: batch-64, batch-8192), or give a file" in line
    assert "unknown recipe 'zzz': known: batch-64, batch-8192, or give a file's name" in mistake(*MINI, "--recipe", "zzz")
    assert cli.run([*MINI, "--recipe", "batch-64", "--name", "named"]) == 0
    assert "global_batch = 64\n" in (runs / "named" / "config.toml").read_text()
    Path("batch-64").write_text("global_batch = 32\n")  # a file of that name is meant first
    assert toml.read_recipe("batch-64") == {"global_batch": 32}


def test_the_packaged_recipes_are_recipes_and_travel_with_the_package():
    for name in toml.packaged_recipes():
        config.make_config(toml.read_recipe(name))
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "recipes/*.toml" in project["tool"]["setuptools"]["package-data"]["paceline"]


@pytest.mark.parametrize(
    ("text", "words", "where"),
    [
        ("import paceline\nraise ValueError('no data')", "task my_task.py raised ValueError: no data", "line 2"),
        ("def task():\n    return 1 / 0", "raised ZeroDivisionError: division by zero", "line 2, in task"),
        ("def task():\n    raise KeyError('two\\nlines')", "raised KeyError: ", "line 2, in task"),
        ("def task():\n    raise RuntimeError('two\\nlines')", "raised RuntimeError: two lines", "line 2, in task"),
        ("x = 1\ndef task(:", "raised SyntaxError: invalid syntax", "line 2"),
        ("import no_such_module", "raised ModuleNotFoundError: No module named 'no_such_module'", "line 1"),
        ("import sys\nsys.exit(0)", "raised SystemExit: 0", "line 2"),
        ("from paceline import PacelineError\ndef task():\n    raise PacelineError('mine')", "mine", "line 3, in task"),
        ("from paceline import Task\ndef task():\n    return Task()", "TypeError", "line 3, in task"),
    ],
)
def test_a_broken_task_file_is_one_line_and_the_users_own(capsys, runs, text, words, where):
    Path("my_task.py").write_text(text + "\n")
    assert cli.run(["train", "my_task.py"]) == (1 if words == "mine" else 2)
    line, *frame = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline: ")
    assert words in line
    assert frame == [
        f"  my_task.py, {where}",
        f"      {text.splitlines()[-1].strip()}",
        "(for the whole traceback, add --traceback)",
    ]
    assert not runs.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def task():\n    return 3", "task() in my_task.py returned an int: it must return a paceline.Task"),
        ("def tsk():\n    return 3", "my_task.py has no function task()"),
    ],
)
def test_a_task_file_without_a_task_is_one_line(mistake, runs, text, words):
    Path("my_task.py").write_text(text + "\n")
    assert words in mistake("train", "my_task.py")
    assert not runs.exists()


FAILS = """
import torch
from paceline import Arrays, Task

def objective(model, batch):
    inputs, labels = batch
    return {"loss": model(inputs)[:, 0]}

def task():
    data = lambda: Arrays((torch.ones(8, 1),))
    return Task(name="fails", model=lambda: torch.nn.Linear(1, 1), train=data, validation=data, objective=objective)
"""


def test_an_error_in_the_objective_is_one_line_and_the_users_own(capsys, runs):
    Path("my_task.py").write_text(FAILS)
    assert cli.run(["train", "my_task.py", "--global-batch", "4", "--name", "x"]) == 1
    why, where = "ValueError: not enough values to unpack (expected 2, got 1)", "my_task.py, line 6, in objective"
    assert capsys.readouterr().err.splitlines() == [
        f"paceline: {why}",
        f"  {where}",
        "      inputs, labels = batch",
        "(for the whole traceback, add --traceback, or see runs/x/result.json)",
    ]
    result = read_result(runs / "x")
    assert (result["status"], result["why"], result["where"]) == ("failed", why, f"{where}\n    inputs, labels = batch")
    assert result["traceback"].startswith("Traceback (most recent call last):\n")
    assert result["traceback"].endswith(why)
    assert cli.run(["train", "my_task.py", "--global-batch", "4", "--name", "y", "--traceback"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"paceline: {why}\n  {where}\n      inputs, labels = batch\nTraceback (most recent call last):\n")
    assert shown.endswith(f"{why}\n")


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_shows_the_traceback_of_an_error_if_asked_to(capsys, verb):
    assert cli.run([verb, "--no-such-flag", "--traceback"]) == 2
    line, *rest = capsys.readouterr().err.splitlines()
    assert "unknown flag --no-such-flag" in line or "required" in line
    assert rest[0] == "Traceback (most recent call last):"
    with pytest.raises(SystemExit):
        cli.run([verb, "--help"])
    assert "--traceback" in capsys.readouterr().out


def test_a_missing_task_file_says_where_it_looked(mistake, tmp_path):
    assert f"task file my_task.py does not exist (looked in {tmp_path})" in mistake("train", "my_task.py")


def test_a_fixed_task_file_is_read_again(capsys):
    for text in ("first", "second, longer"):
        Path("my_task.py").write_text(f"raise ValueError('{text}')\n")
        assert cli.run(["train", "my_task.py"]) == 2
        assert f"raised ValueError: {text}\n" in capsys.readouterr().err


def test_corrupt_data_is_one_line(mistake, runs):
    shutil.copytree(fashion_mnist._MINI_FOLDER, "data")
    labels = Path("data") / f"{fashion_mnist.TRAIN_LABELS}.gz"
    labels.write_bytes(labels.read_bytes()[:100])
    line = mistake("train", "fashion-mnist", *QUICK, "--data-dir", "data", code=1)
    assert fashion_mnist.TRAIN_IMAGES in line or fashion_mnist.TRAIN_LABELS in line
    assert not runs.exists()


def test_a_runs_dir_that_is_a_file(mistake):
    Path("file").write_text("mine")
    assert "cannot write the record in file" in mistake(*MINI, "--runs-dir", "file", code=1)
    assert Path("file").read_text() == "mine"
    assert [path.name for path in Path().iterdir()] == ["file"]


def test_a_runs_dir_that_cannot_be_written(mistake):
    line = mistake(*MINI, "--runs-dir", "/proc/paceline-runs", code=1)  # root may write everywhere else
    assert "cannot write the record in /proc/paceline-runs" in line
    assert "choose another --runs-dir" in line
    assert not list(Path().iterdir())


def test_train_says_0_and_leaves_a_record(runs, capsys):
    assert cli.run([*MINI, "--name", "first"]) == 0
    assert "record in runs/first" in capsys.readouterr().out
    names = {path.name for path in (runs / "first").iterdir()}
    files = {"config.toml", "environment.json", "metrics.jsonl", "course.csv", "model.safetensors", "result.json"}
    assert names == {*files, "checkpoints"}


def test_data_list_and_verify(capsys):
    assert cli.run(["data", "list"]) == 0
    assert "fashion-mnist-mini" in capsys.readouterr().out
    assert cli.run(["data", "verify", "fashion-mnist-mini"]) == 0
    assert capsys.readouterr().out.count("ok ") == 4


def test_data_verify_of_damaged_data_says_which_file_and_fails(capsys):
    shutil.copytree(fashion_mnist._MINI_FOLDER, "data")
    assert cli.run(["data", "verify", "fashion-mnist", "--data-dir", "data"]) == 1
    assert capsys.readouterr().out.count("BAD") == 4  # the mini files are not the published ones


def test_an_error_of_ours_has_a_traceback(capsys, monkeypatch):
    names: dict[str, Any] = {}
    exec(compile("def broken(*_, **__):\n    raise LookupError('a bug')", training.__file__, "exec"), names)
    monkeypatch.setattr(training, "run_task", names["broken"])
    assert cli.run([*MINI]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["paceline: LookupError: a bug", "Traceback (most recent call last):"]
    assert lines[-2] == "LookupError: a bug"
    assert lines[-1].startswith("(no line of your own code was found in this traceback")


def test_interrupted_is_130(capsys, monkeypatch):
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run_task", interrupt)
    assert cli.run([*MINI]) == 130
    assert capsys.readouterr().err == "paceline: interrupted\n"


def test_only_rank_0_speaks_of_the_users_mistake(capsys, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert cli.run(["train", "fashion-mnist-mini", "--epochs", "0"]) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli.run(["train", "fashion-mnist-mini", "--epochs", "0"]) == 2
    assert capsys.readouterr().err == "paceline: worker 0: --epochs is 0: it must be at least 1\n"


def test_every_rank_reports_its_own_samples(capsys, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise SampleError("samples 3 and 7 differ")

    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(training, "run_task", refuse)
    assert cli.run([*MINI]) == 2
    assert capsys.readouterr().err.startswith("paceline: worker 1: samples 3 and 7 differ\n")


@pytest.mark.parametrize("first", [True, False])
def test_under_another_launcher_the_worker_that_failed_first_prints_its_error(capsys, monkeypatch, first):
    def fail(*_: Any, **__: Any) -> None:
        error = UsageError("mine")
        claim_first(SimpleNamespace(add=lambda key, amount: 1 if first else 2, set=print), error)
        raise error

    slept: list[float] = []
    monkeypatch.setattr(training, "run_task", fail)
    monkeypatch.setattr("time.sleep", slept.append)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert cli.run([*MINI]) == 2
    assert capsys.readouterr().err.startswith("paceline: worker 1: mine\n") == first
    assert bool(slept) != first, "the others let the first one print"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--help",), ("train", "data", "doctor", "examples:", "--version")),
        (("train", "--help-all"), ("TASK", "--recipe", *(flag(f.name) for f in dataclasses.fields(Config)))),
        (("data", "--help"), ("list", "fetch", "verify", "--data-dir")),
        (("doctor", "--help"), ("usage: paceline doctor",)),
        (("toys", "--help"), ("--toy", "--seed", "--seeds", "--steps", "--lr", "--rates", "--noise", "--momentum", "--name")),
        (
            ("study", "--help"),
            ("FILE", "--runs-dir", "--out", "--seeds", "--set", "--only", "--per-device", "--mini", "--table"),
        ),
        (
            ("rehearse", "--help-all"),
            (
                "TASK",
                "--recipe",
                "--seeds",
                "--margin",
                "--runs-dir",
                *map(flag, OPTIONS - names_with(Role.STUDY) - {"workers_schedule"}),
            ),
        ),
    ],
)
def test_help_lists_everything(capsys, argv, words):
    with pytest.raises(SystemExit) as caught:
        cli.run(argv)
    assert not caught.value.code
    out = capsys.readouterr().out
    missing = [word for word in words if word not in out]
    assert not missing


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.run(["--version"])
    assert capsys.readouterr().out.startswith("paceline 0.")


def test_a_global_batch_far_beyond_the_data_is_one_step_an_epoch(runs: Path) -> None:
    argv = ["train", "fashion-mnist-mini", "--model", "linear", "--max-steps", "2", "--lr-rule", "none"]
    assert cli.run([*argv, "--train-samples", "300", "--global-batch", "1000000000000"]) == 0


def test_an_error_of_ours_has_no_control_characters(capsys, monkeypatch):
    def fail(*_: Any) -> int:
        raise LookupError("\x1b[2J")

    monkeypatch.setattr(verb, "run", fail)
    assert cli.run(["doctor"]) == 1
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("gone", [True, False])
def test_only_a_reader_that_goes_away_is_no_traceback(capsys, monkeypatch, gone):
    """A BrokenPipeError of something else, such as a socket in a task that `scale` runs, is explained."""

    def broken(*_: Any) -> int:
        raise BrokenPipeError

    reader, writer = os.pipe()
    try:
        if gone:
            os.close(reader)
        monkeypatch.setattr(verb, "run", broken)
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: writer))
        assert cli.run(["doctor"]) == 1
        assert ("BrokenPipeError" in capsys.readouterr().err) == (not gone)
    finally:
        os.close(writer)
        if not gone:
            os.close(reader)


def test_sys_exit_in_user_code_is_an_error(monkeypatch, capsys):
    def leave(options):
        sys.exit(0)

    monkeypatch.setattr(verb, "run", leave)
    assert cli.run(["doctor"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("paceline: sys.exit(0) was called in leave, line ")
    assert len(err.splitlines()) == 1


def test_exit_is_named_where_the_user_called_it():
    with pytest.raises(PacelineError, match=r"sys.exit\(3\) was called in test_exit_is_named"), refuse_exit():
        exit(3)


@pytest.mark.parametrize("verb", ["study", "plan", "runs", "doctor", "toys"])
def test_help_all_of_a_verb_without_more_options_is_its_help(capsys, verb):
    with pytest.raises(SystemExit) as caught:
        cli.run([verb, "--help-all"])
    assert not caught.value.code
    assert f"usage: paceline {verb}" in capsys.readouterr().out


def test_the_traceback_flag_may_come_first(capsys, runs):
    assert cli.run(["--traceback", "train", "nowhere"]) == 2
    assert "unknown task 'nowhere'" in capsys.readouterr().err


def test_no_runs_yet_is_not_an_error(capsys, runs):
    assert cli.run(["runs"]) == 0
    assert capsys.readouterr().out.startswith("no runs yet: paceline train")
