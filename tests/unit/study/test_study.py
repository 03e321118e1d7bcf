"""A study: each run is trained once, whatever happens; failures are counted; mistakes are one line before anything starts."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from paceline import cli
from paceline.config import merge_options
from paceline.errors import Stopped, UsageError
from paceline.files import write_json
from paceline.records import read_metrics
from paceline.study import runs as runs_module
from paceline.study import slots
from paceline.study.results import MINI, legend, markdown, table
from paceline.study.runs import Call, claim, read_state
from paceline.study.study import Arm, Study, list_runs, parse_seeds, parse_settings, read_study, shrink
from paceline.training import run as training

TINY = """
task = "fashion-mnist-mini"
seeds = 2
margin = 0.05
target_accuracy = 0.3
about = "tiny"
[options]
model = "linear"
train_samples = 128
global_batch = 32
epochs = 2
[arms.plain]
[arms."V = 4"]
virtual_workers = 4
"""


TASK = '''
import os
import signal
import torch
from torch import nn
from paceline import Arrays, Task

def points(n):
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(n))
    return Arrays((x, x.sum(1)))

def objective(model, batch):
    x, y = batch
    happen(len(x), model.training)
    return {"loss": (model(x).squeeze(1) - y) ** 2}

def once(name):
    """Whether this is the first time, over all processes."""
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def happen(samples, training):
    HAPPENS

def task():
    return Task(name="points", train=lambda: points(64), validation=lambda: points(32), objective=objective,
                model=lambda: nn.Linear(5, 1), defaults={"global_batch": 8, "epochs": 2})
'''


POINTS = """
task = "my_task.py"
seeds = 2
[arms.small]
global_batch = 8
[arms.large]
global_batch = 16
"""


@pytest.fixture(autouse=True)
def own_process(runs: Path) -> Iterator[None]:
    """Reset what would otherwise leak from one call into the next: each has its own process in real use."""
    path = list(sys.path)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.path[:] = path
    sys.modules.pop("my_task", None)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs that were trained, in order."""
    names: list[str] = []

    def count(task: Any, **options: Any) -> Any:
        names.append(options["name"] + (" resumed" if options.get("resume") else ""))
        return mock.DEFAULT

    # The mock calls `train` itself: a frame of this file would count as the user's own.
    monkeypatch.setattr(training, "train", mock.Mock(wraps=training.train, side_effect=count))
    return names


@pytest.fixture
def mistake(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must fail with one line on stderr; returns the line."""

    def call(*argv: str, code: int = 2) -> str:
        assert cli.run(argv) == code
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1, err
        return err.removeprefix("paceline: ").rstrip()

    return call


def write(text: str, name: str = "tiny.toml") -> str:
    Path(name).write_text(text)
    return name


def write_task(happens: str) -> None:
    Path("my_task.py").write_text(TASK.replace("HAPPENS", happens))


def results(name: str = "study-tiny") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("runs", name, "study.json").read_text())
    return found


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seeds = 2", "seed = 2", "study tiny.toml: unknown key 'seed': did you mean 'seeds'?"),
        ("seeds = 2", "seeds = 0", "study tiny.toml: seeds is 0: it must be a number of seeds, 1 to 1000"),
        ("seeds = 2", "seeds = [1, -2]", "study tiny.toml: seeds is [1, -2]"),
        ("seeds = 2", "seeds = true", "study tiny.toml: seeds is True"),
        ("margin = 0.05", "margin = 0", "study tiny.toml: margin is 0: it must be a positive number"),
        ("margin = 0.05", 'margin = "small"', "study tiny.toml: margin is 'small': it must be a positive number"),
        (
            "target_accuracy = 0.3",
            "target_accuracy = 94",
            "study tiny.toml: target_accuracy is 94: it must be a number between",
        ),
        ('about = "tiny"', 'reference = "plan"', "study tiny.toml: unknown reference 'plan': did you mean 'plain'?"),
        ('task = "fashion-mnist-mini"', "", "study tiny.toml: it names no task"),
        ('task = "fashion-mnist-mini"', 'task = "fashion-mnst"', "unknown task 'fashion-mnst': did you mean 'fashion-mnist'?"),
        ("epochs = 2", "epoch = 2", "study tiny.toml, [options]: unknown key 'epoch': did you mean 'epochs'?"),
        ("epochs = 2", "seed = 2", "study tiny.toml, [options]: seed cannot be set here: the study sets it; use seeds"),
        ("virtual_workers = 4", 'runs_dir = "x"', "study tiny.toml, arm 'V = 4': runs_dir cannot be set here"),
        ("virtual_workers = 4", 'name = "x"', "arm 'V = 4': name cannot be set here"),
        ("virtual_workers = 4", "resume = true", "arm 'V = 4': resume cannot be set here"),
        ("virtual_workers = 4", "virtual_workers = 0", "study tiny.toml, arm 'V = 4': --virtual-workers is 0: it must be at"),
        ("virtual_workers = 4", "virtual_workers = 5", "study tiny.toml, arm 'V = 4': a global batch of 32 does not divide"),
        ("virtual_workers = 4", "warmup_epochs = 1", "study tiny.toml, arm 'V = 4': one-cycle warms up by itself"),
        (
            "virtual_workers = 4",
            'model = "liner"',
            "study tiny.toml, arm 'V = 4': unknown model 'liner': did you mean 'linear'?",
        ),
        ("virtual_workers = 4", 'lr_rule = "adascale"', "arm 'V = 4': --lr-rule adascale compares the gradients of parts"),
        ("virtual_workers = 4", "local_steps = 2", "arm 'V = 4': --local-steps needs at least two virtual workers"),
        ("virtual_workers = 4", "sam_rho = 0.1\naccumulate = 2", "arm 'V = 4': --sam-rho cannot be combined with --accumulate"),
        ("seeds = 2", "seeds = 1000000000", "it must be a number of seeds, 1 to 1000, or a list"),
        ("[arms.plain]", '[arms."pl\\u001bain"]', "an arm's name must be plain text in one line"),
        ("virtual_workers = 4", 'optimizer = "sgdd"', "study tiny.toml, arm 'V = 4': unknown optimizer 'sgdd'"),
        ("virtual_workers = 4", 'recipe = "no.toml"', "study tiny.toml, arm 'V = 4': cannot read recipe no.toml: No such file"),
        ("virtual_workers = 4", 'recipe = "no-such"', "study tiny.toml, arm 'V = 4': unknown recipe 'no-such'"),
        ("[arms.plain]", '[arms."v -- 4"]', "study tiny.toml: arms 'v -- 4' and 'V = 4' would share the folder name v-4"),
        ("[arms.plain]", '[arms."!"]', "study tiny.toml, arm '!': its name needs a letter or a digit"),
        ("[arms.plain]", "[arms]\nplain = 3", "study tiny.toml, arm 'plain': it is 3: it must be a table of options"),
        ("[arms.plain]", "[arms.plain", "study tiny.toml is not valid TOML"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(mistake, runs, old, new, words):
    assert old in TINY
    assert words in mistake("study", write(TINY.replace(old, new, 1)))
    assert not runs.exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("study", "no.toml"), "cannot read study no.toml: No such file"),
        (("study", "tiny.toml", "--only", "plan"), "unknown arm for --only 'plan': did you mean 'plain'?"),
        (("study", "tiny.toml", "--seeds", "x"), "--seeds is 'x': it must be a number of seeds (3) or a list"),
        (("study", "tiny.toml", "--set", "epochs"), "--set epochs: it must be key=value"),
        (("study", "tiny.toml", "--set", "epoch=3"), "--set: unknown key 'epoch': did you mean 'epochs'?"),
        (("study", "tiny.toml", "--set", "seed=3"), "--set: seed cannot be set here"),
        (("study", "tiny.toml", "--per-device", "0"), "--per-device is 0: it must be at least 1"),
        (("study", "tiny.toml", "--per-device", "two"), "invalid int value: 'two'"),
        (("study", "tiny.toml", "--table"), "cannot read results runs/study-tiny/study.json: No such file"),
        (("study", "tiny.toml", "--tabel"), "unknown flag --tabel: did you mean --table?"),
        (("study", "bare.toml"), "study bare.toml: it has no arms"),
    ],
)
def test_mistakes_in_flags(mistake, runs, argv, words):
    write(TINY)
    write('task = "fashion-mnist-mini"\n', "bare.toml")
    assert words in mistake(*argv)
    assert not runs.exists()


def test_a_study_refuses_to_run_under_another_launcher(mistake, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "a study starts its own runs: start it by itself, not with torchrun" in mistake("study", write(TINY))


def test_which_options_override_which(tmp_path):
    write('epochs = 5\nbase_lr = 0.3\nseed = 9\nname = "old"\n', "base.toml")
    text = TINY.replace("virtual_workers = 4", 'recipe = "base.toml"\nbase_lr = 0.4')
    found = read_study(Path(write(text)), settings=["momentum=0.5", "flip=false", "--weight-decay=0"], seeds="3,1")
    assert found.seeds == (3, 1)
    assert found.reference == "plain"
    assert found.arms[1].options["epochs"] == 5  # the recipe over [options]
    assert found.arms[1].options["base_lr"] == 0.4  # the arm over its recipe
    for arm in found.arms:
        assert (arm.options["momentum"], arm.options["flip"], arm.options["weight_decay"]) == (0.5, False, 0.0)
        assert not {"seed", "name"} & arm.options.keys()


@pytest.mark.parametrize(("text", "seeds"), [("2", (0, 1)), ("2,", (2,)), ("0,5,7", (0, 5, 7)), ("1, 1, 3,", (1, 3))])
def test_seeds_are_a_number_or_a_list(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", ",", "2,,", "two", "2,x"])
def test_bad_seeds_are_a_mistake(text):
    with pytest.raises(UsageError, match="it must be a number of seeds"):
        parse_seeds(text)


def test_files_are_found_next_to_the_study(tmp_path):
    Path("there").mkdir()
    write("epochs = 7\n", "there/base.toml")
    write(TASK, "there/my_task.py")
    text = POINTS.replace("global_batch = 8", 'recipe = "base.toml"')
    found = read_study(Path(write(text, "there/own.toml")))
    assert found.task == "there/my_task.py"
    assert found.arms[0].options == {"epochs": 7}


def test_warm_up_in_steps_replaces_warm_up_in_epochs():
    assert merge_options({"warmup_epochs": 2}, {"warmup_steps": 5}) == {"warmup_steps": 5}
    assert merge_options({"warmup_epochs": 2, "schedule": "cosine"}, {"schedule": "one-cycle"}) == {"schedule": "one-cycle"}
    assert parse_settings(["warmup-steps=5"]) == {"warmup_steps": 5}


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, (1, 4, 4)),
        ({"virtual_workers": 64}, (64, 256, 4)),
        ({"virtual_workers": 64, "global_batch": 512}, (64, 256, 64)),  # parts of 4; k stays 4
        ({"workers": 8, "global_batch": 8192}, (8, 256, 4)),
        ({"workers_schedule": "0:1 5:8", "global_batch": 8192}, (8, 256, 4)),
        ({"workers_schedule": "auto:8", "batch_schedule": "0:1024 1:8192"}, (8, 256, 4)),
        ({"virtual_workers": 2, "accumulate": 8}, (2, 16, 8)),
        ({"global_batch": "16384", "reference_batch": 512}, (1, 512, 16)),
    ],
)
def test_mini_divides_the_batches_by_32_and_keeps_v_and_k(options, batches):
    study = Study(name="s", source="s", task="fashion-mnist", seeds=(3, 4), arms=(Arm(name="a", options=options),))
    (arm,) = shrink(study).arms
    assert tuple(arm.options[name] for name in ("virtual_workers", "global_batch", "reference_batch")) == batches
    assert not {"workers", "workers_schedule"} & set(arm.options)
    assert list_runs(shrink(study))  # this checks the arm
    assert shrink(study).seeds == (3,)
    assert arm.options["train_samples"] == 3 * batches[1]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"batch_schedule": "0:1024 1:2048 3:4096 6:8192", "virtual_workers": 4}, ("0:32 0.1:64 0.3:128 0.6:256", 256, 4)),
        ({"batch_schedule": "0:1024 9:60000", "virtual_workers": 30, "smallest_part": 2000}, ("0:31 0.9:1860", 1860, 62)),
        ({"batch_schedule": "0:1000 1:8192", "virtual_workers": 8, "smallest_part": 64}, ("0:28 0.1:256", 256, 4)),
        ({"batch_schedule": "auto:512", "global_batch": 8192, "virtual_workers": 4}, ("auto", 256, 4)),
        ({"batch_schedule": "auto", "global_batch": 512, "virtual_workers": 4}, ("auto", 16, 4)),
        ({"batch_schedule": "0:512 12:1024", "virtual_workers": 2}, ("0:16 0.923076923:32", 32, 4)),
        ({"batch_schedule": {"0": 512, "1": 1024}, "accumulate": 4, "virtual_workers": 2}, ("0:16 0.1:32", 32, 4)),
    ],
)
def test_mini_keeps_the_phases_of_a_batch_schedule(options, found):
    options = {"epochs": 10, **options}
    study = Study(name="s", source="s", task="fashion-mnist", seeds=(3,), reference="a", arms=(Arm(name="a", options=options),))
    (arm,) = shrink(study).arms
    assert tuple(arm.options[name] for name in ("batch_schedule", "global_batch", "smallest_part")) == found
    assert list_runs(shrink(study))  # this checks the arm


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_schedule": "0:100 1:512"}, "the global batch of 100 from epoch 0 on does not divide into 3 equal parts"),
        ({"batch_schedule": "0:96 1:511"}, "a global batch of 511 does not divide"),
        ({"batch_schedule": "0:64 3:512", "epochs": 2}, "a phase from epoch 3 on, but the run has 2 epochs"),
        ({"batch_schedule": "auto", "virtual_workers": 1}, "use --virtual-workers 2 or more"),
        ({"batch_schedule": "auto:300", "global_batch": 1024}, "not 300 times a power of 2: use --global-batch 1200"),
        ({"workers_schedule": "0:1 3:2", "epochs": 2}, "2 workers from epoch 3 on, but the run has 2 epochs"),
        ({"workers": "auto", "batch_schedule": "0:64 1:512", "virtual_workers": None}, "give --virtual-workers"),
        ({"workers_schedule": "auto"}, "--workers auto follows --batch-schedule, which is not given"),
    ],
)
def test_a_schedule_is_checked_before_anything_is_trained(options, words):
    arm = Arm(name="a", options={"virtual_workers": 8, **options})
    study = Study(name="s", source="s", task="fashion-mnist", seeds=(3,), reference="a", arms=(arm,))
    with pytest.raises(UsageError, match=words):
        list_runs(study)


def test_every_arm_and_seed_is_a_record_and_the_second_call_does_nothing(runs, trained, capsys):
    assert cli.run(["study", write(TINY), "--out", "copy.json"]) == 0
    names = ["plain-seed0", "v-4-seed0", "plain-seed1", "v-4-seed1"]
    assert trained == names
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if re.match(r"\[\d/4\] .*, seed \d: loss .*, accuracy ", line)]) == 4
    assert "Epoch = " not in out
    assert "Epoch = 2" in Path("runs/study-tiny/plain-seed0.log").read_text()
    found = results()
    assert json.loads(Path("copy.json").read_text()) == found
    assert "NaN" not in Path("copy.json").read_text()
    for each, name in zip(found["runs"], names, strict=True):
        record = runs / "study-tiny" / name
        assert (record / "model.safetensors").exists()
        assert each["status"] == "done"
        assert (each["epochs"], each["steps"], len(each["val_accuracy"]), len(each["time_s"])) == (2, 8, 2, 2)
        assert each["metrics"]["accuracy"] == each["val_accuracy"][-1]
        assert each["contract"]["global_batch"] == 32
        assert each["contract"]["virtual_workers"] == (4 if "v-4" in name else 1)
        assert each["model_sha256"] == json.loads((record / "result.json").read_text())["model_sha256"]
        reached = [t for t, a in zip(each["time_s"], each["val_accuracy"], strict=True) if a >= 0.3]
        assert each["time_to_target_s"] == (reached[0] if reached else None)
    assert found["environment"]["versions"]["torch"]
    assert found["per_device"] == 1
    assert len(found["environment"]["devices"]) == 1
    assert table(found) in out
    assert cli.run(["study", "tiny.toml"]) == 0
    assert trained == names
    assert "4 runs, 4 already done" in capsys.readouterr().out
    assert cli.run(["study", "tiny.toml", "--set", "log_every=3"]) == 0  # says nothing about the model
    assert trained == names


def test_a_growing_arm_shows_its_batches_and_its_steps(capsys):
    grown = TINY.replace("virtual_workers = 4", 'virtual_workers = 2\nsmallest_part = 4\nbatch_schedule = "0:8 1:32"')
    assert cli.run(["study", write(grown), "--seeds", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"failed +median time to 0.3 +global batch +steps +V +peak lr\n", out)
    assert re.search(r"\nplain .* 32 +8 +1 ", out)
    assert re.search(r"\nV = 4 .* 8 to 32 in 2 phases +20 +2 ", out)
    assert results()["runs"][1]["batches"] == [8, 32]
    found = results()
    del found["runs"][1]["batches"]  # as older results: the schedule is in the options
    assert table(found) in out
    found["runs"][1] |= {"status": "diverged", "batches": [8]}  # it did not get to the second phase
    assert "8 to 32 in 2 phases" in table(found)
    del found["runs"][1]["batches"]
    found["study"]["arms"]["V = 4"]["options"]["batch_schedule"] = ["no schedule"]
    assert "phases" not in table(found)


def test_changed_options_run_again_and_the_old_record_is_kept(runs, trained, capsys):
    cli.run(["study", write(TINY), "--seeds", "1"])
    trained.clear()
    old = (runs / "study-tiny" / "v-4-seed0" / "result.json").read_text()
    assert cli.run(["study", write(TINY.replace("virtual_workers = 4", "virtual_workers = 8")), "--seeds", "1"]) == 0
    assert trained == ["v-4-seed0"]
    note = "run again because its options changed (--virtual-workers was 4, is 8); the old record is in"
    assert f"{note} runs/study-tiny/v-4-seed0.old-1" in capsys.readouterr().out
    assert (runs / "study-tiny" / "v-4-seed0.old-1" / "result.json").read_text() == old
    assert results()["runs"][1]["contract"]["virtual_workers"] == 8
    cli.run(["study", write(TINY), "--seeds", "1"])
    assert (runs / "study-tiny" / "v-4-seed0.old-2").is_dir()


def test_only_some_arms_and_then_the_rest(trained, capsys):
    cli.run(["study", write(TINY), "--only", "V = 4", "--seeds", "1"])
    assert trained == ["v-4-seed0"]
    assert "no verdict (no run ended)" in capsys.readouterr().out
    cli.run(["study", "tiny.toml", "--seeds", "1"])
    assert trained == ["v-4-seed0", "plain-seed0"]
    assert [run["arm"] for run in results()["runs"]] == ["plain", "V = 4"]


def test_results_with_other_options_are_not_reused(trained):
    cli.run(["study", write(TINY), "--seeds", "1"])
    cli.run(["study", "tiny.toml", "--seeds", "1", "--set", "epochs=1", "--only", "plain"])
    assert [(run["arm"], run["epochs"]) for run in results()["runs"]] == [("plain", 1)]


def test_a_run_that_diverges_counts_as_failed_and_the_study_continues(trained, capsys):
    text = TINY.replace("virtual_workers = 4", "base_lr = 1e9\nepochs = 4")
    assert cli.run(["study", write(text)]) == 0
    assert [run["status"] for run in results()["runs"]] == ["done", "diverged", "done", "diverged"]
    out = capsys.readouterr().out
    assert re.search(r"V = 4, seed 0: diverged: the .*loss is (nan|inf|[0-9.e+]+ \(in the first step)", out)
    assert re.search(r"V = 4 +worse \(2 of 2 diverged\) +- \(0\) +2 +- \(0 of 2\) +32 +1 +2.5e\+08\n", out)
    trained.clear()
    cli.run(["study", "tiny.toml"])
    assert not trained  # it would diverge again


def test_an_error_in_one_run_does_not_stop_the_others(trained, capsys):
    write_task("if samples == 16 and training: raise MemoryError('out of\\nmemory')")
    assert cli.run(["study", write(POINTS)]) == 0
    assert [run["status"] for run in results()["runs"]] == ["done", "failed", "done", "failed"]
    out = capsys.readouterr().out
    assert "large, seed 1: failed: MemoryError: out of memory (my_task.py, line " in out
    failed = results()["runs"][1]
    assert failed["where"].startswith("my_task.py, line ")
    assert "raise MemoryError" in failed["where"]
    assert "no verdict (2 of 2 failed)" in out
    assert "Traceback" in Path("runs/study-tiny/large-seed0.log").read_text()
    write_task("pass")
    sys.modules.pop("my_task")
    trained.clear()
    cli.run(["study", "tiny.toml"])  # the cause may be fixed by now
    assert trained == ["large-seed0 resumed", "large-seed1 resumed"]
    assert [run["status"] for run in results()["runs"]] == ["done"] * 4


def test_a_device_that_this_process_cannot_use_any_more_ends_the_study(trained, mistake):
    write_task("if samples == 16 and once('lost'): raise RuntimeError('CUDA error: an illegal memory access')")
    line = mistake("study", write(POINTS), "--seeds", "1", code=1)
    assert line.startswith("arm 'large', seed 0: RuntimeError: CUDA error: an illegal memory access; run the same command")
    assert cli.run(["study", "tiny.toml", "--seeds", "1"]) == 0
    assert [run["status"] for run in results()["runs"]] == ["done"] * 2


def test_on_a_terminal_there_is_a_progress_bar_and_the_same_lines(monkeypatch):
    """stdout and stderr are one terminal: the bar is on it while runs train, the lines stay."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w", closefd=False) as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        assert cli.run(["study", write(TINY), "--seeds", "1"]) == 0
    os.set_blocking(ours, False)
    shown = ""
    with suppress(BlockingIOError):
        while text := os.read(ours, 1 << 16):
            shown += text.decode()
    os.close(ours)
    os.close(theirs)
    assert "0 of 2 done" in shown
    assert "━" in shown
    for line in (r"\[1/2\] plain, seed 0: loss .*, accuracy .*", r"\[2/2\] V = 4, seed 0: loss .* samples/s"):
        assert re.search(line, shown)
    assert "study-tiny: 2 arms x 1 seed on fashion-mnist-mini: 2 runs; records in runs/study-tiny" in shown


def test_a_task_without_accuracy_is_compared_by_loss(capsys):
    write_task("pass")
    assert cli.run(["study", write(POINTS)]) == 0
    assert results()["metric"] == "loss"
    out = capsys.readouterr().out
    assert " loss, mean ± sd (n) " in out
    assert "points" not in out.replace("points-", "")


def test_a_task_without_validation_cannot_be_compared(trained, mistake):
    Path("my_task.py").write_text(TASK.replace("HAPPENS", "pass").replace(" validation=lambda: points(32),", ""))
    assert "arm 'small': task points has no validation data, so nothing can be compared" in mistake("study", write(POINTS))
    assert not trained


def test_a_users_mistake_in_a_run_ends_the_study(trained, mistake):
    text = TINY.replace('[arms."V = 4"]', '[arms."V = 4"]\nglobal_batch = 1024').replace(
        "virtual_workers = 4", "virtual_workers = 512"
    )
    line = mistake("study", write(text))
    assert line.startswith("arm 'V = 4', seed 0: 128 training samples cannot feed 512 virtual workers")
    assert trained == ["plain-seed0", "v-4-seed0"]


def test_ctrl_c_between_two_runs(trained, mistake, monkeypatch):
    counted = training.train

    def interrupt(task: Any, **options: Any) -> Any:
        if len(trained) == 1:
            raise KeyboardInterrupt
        return counted(task, **options)

    with monkeypatch.context() as patch:
        patch.setattr(training, "train", interrupt)
        line = mistake("study", write(TINY), code=130)
    assert line == "stopped by Ctrl-C: 1 of 4 runs are done; run the same command to continue"
    assert len(results()["runs"]) == 1
    cli.run(["study", "tiny.toml"])
    assert trained == ["plain-seed0", "v-4-seed0", "plain-seed1", "v-4-seed1"]


def test_after_ctrl_c_a_run_continues_from_its_checkpoint(trained, mistake, monkeypatch):
    write_task("samples == 16 and training and once('interrupted') and os.kill(os.getpid(), signal.SIGINT)")
    assert "1 of 4 runs are done" in mistake("study", write(POINTS), code=130)
    assert json.loads(Path("runs/study-tiny/large-seed0.run.json").read_text())["status"] == "interrupted"
    trained.clear()
    assert cli.run(["study", "tiny.toml"]) == 0
    assert trained == ["large-seed0 resumed", "small-seed1", "large-seed1"]
    (resumed,) = [row for row in read_metrics(Path("runs/study-tiny/large-seed0")) if row["kind"] == "resume"]
    assert 1 <= resumed["step"] < 8
    assert [run["status"] for run in results()["runs"]] == ["done"] * 4
    assert not list(Path("runs/study-tiny").glob("*.old-*"))


def test_a_record_that_cannot_be_resumed_starts_over(trained):
    """Killed before the record was complete, or the data has changed."""
    write_task("pass")
    cli.run(["study", write(POINTS), "--seeds", "1"])
    record, state = Path("runs/study-tiny/small-seed0"), Path("runs/study-tiny/small-seed0.run.json")
    state.write_text(state.read_text().replace('"done"', '"running"'))
    (record / "metrics.jsonl").unlink()
    cli.run(["study", "tiny.toml", "--seeds", "1"])
    assert trained[2:] == ["small-seed0"]
    assert record.with_name("small-seed0.old-1").exists()
    assert [run["status"] for run in results()["runs"]] == ["done"] * 2


def test_a_run_claimed_by_another_process_is_skipped(trained, monkeypatch, capsys):
    """The other process gives it up when we start to wait for it."""
    runs = list_runs(read_study(Path(write(TINY))))
    folder = Path("runs/study-tiny")
    (folder / ".claims").mkdir(parents=True)
    theirs = claim(Call(folder, "theirs"), runs[0])
    assert theirs.__enter__()
    clock = SimpleNamespace(time=time.time, sleep=lambda _: theirs.__exit__(None, None, None))
    monkeypatch.setattr(slots, "time", clock)  # not time.sleep itself, which other code uses too
    assert cli.run(["study", "tiny.toml"]) == 0
    assert trained == ["v-4-seed0", "plain-seed1", "v-4-seed1", "plain-seed0"]
    assert capsys.readouterr().out.count("another process is training the remaining runs") == 1


def test_a_signal_just_after_a_run_is_done_leaves_it_done(trained, monkeypatch):
    runs = list_runs(read_study(Path(write(TINY))))
    call = Call(Path("runs/study-tiny"), "ours")
    call.folder.mkdir(parents=True)
    monkeypatch.setattr(runs_module, "_train", lambda call, run: None)
    monkeypatch.setattr(runs_module, "read_result", lambda path: {"status": "done"})

    def write_and_stop(path: Path, value: Any, **options: Any) -> None:
        write_json(path, value, **options)
        if value["status"] == "done":
            raise Stopped("stopped by SIGTERM", "SIGTERM")

    monkeypatch.setattr(runs_module, "write_json", write_and_stop)
    with pytest.raises(Stopped):
        runs_module.perform(call, runs[0])
    assert read_state(call, runs[0])["status"] == "done"


def test_results_that_cannot_be_written_are_noticed_before_the_first_run(trained, mistake):
    write(TINY)
    assert "choose another --out" in mistake("study", "tiny.toml", "--out", "nowhere/results.json", code=1)
    assert trained == []


def test_a_run_that_kills_its_process_is_tried_once_more(trained):
    """Its state says that this call started it, and its claim is free: its process has died."""
    folder, runs = Path("runs/study-tiny"), list_runs(read_study(Path(write(TINY))))
    (folder / ".claims").mkdir(parents=True)

    def died(tries: int, call: str = "this") -> dict[str, Any]:
        begun = {"task": runs[0].task, "options": runs[0].resolved, "status": "running", "call": call, "tries": tries}
        write_json(folder / f"{runs[0].name}.run.json", begun)
        slots.work(runs[:1], Call(folder, "this"))
        return read_state(Call(folder, "this"), runs[0])

    found = died(tries=2)
    assert (found["status"], found["why"]) == ("failed", "its process died 2 times")
    assert not trained
    assert died(tries=1)["status"] == "done"
    assert trained == ["plain-seed0"]
    assert died(tries=2, call="another")["status"] == "done"  # a later call tries again


def test_mini_runs_every_arm(capsys):
    text = TINY.replace('"fashion-mnist-mini"', '"fashion-mnist"').replace("epochs = 2", 'epochs = 40\nschedule = "cosine"')
    text = text.replace("global_batch = 32", "global_batch = 8192").replace("train_samples = 128", "warmup_epochs = 5")
    assert cli.run(["study", write(text.replace("virtual_workers = 4", "virtual_workers = 64")), "--mini"]) == 0
    found = results("study-tiny-mini")
    assert [run["status"] for run in found["runs"]] == ["done"] * 2
    assert [run["contract"]["virtual_workers"] for run in found["runs"]] == [1, 64]
    assert all(run["steps"] >= 3 for run in found["runs"])
    assert found["mini"] is True
    assert MINI in (Path("runs") / "study-tiny-mini" / "results.md").read_text()
    assert MINI in capsys.readouterr().out
    assert cli.run(["study", "tiny.toml", "--mini", "--table"]) == 0
    assert table(found) in capsys.readouterr().out


def made(*arms: tuple[str, list[float | str]], metric: str = "accuracy", target: float | None = 0.9) -> dict[str, Any]:
    """Results as a study would write them: text instead of a value is the status of a failed run."""
    runs = []
    for arm, values in arms:
        for seed, value in enumerate(values):
            good = isinstance(value, float)
            contract = {"global_batch": 8192, "virtual_workers": 64, "peak_lr": 3.2} if good else {}
            how = {"status": "done" if good else value, "metrics": {metric: value} if good else {}}
            runs.append(
                {"arm": arm, "seed": seed, **how, "contract": contract, "time_to_target_s": 10.0 + seed if good else None}
            )
    study = {"arms": dict.fromkeys(arm for arm, _ in arms), "reference": arms[0][0], "margin": 0.005, "target_accuracy": target}
    return {"study": study, "metric": metric, "runs": runs}


def cells(text: str, arm: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {arm} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table():
    text = markdown(made(("one", [0.940, 0.941, 0.942]), ("same", [0.941, 0.941, 0.940]), ("low", [0.91, 0.912, 0.911])))
    assert text.startswith(
        "| arm | difference from one | accuracy, mean ± sd (n) | failed | median time to 0.9 | global batch | V | peak lr |\n|-"
    )
    assert cells(text, "one") == ["one", "-", "0.9410 ± 0.0010 (3)", "0", "11 s (3 of 3)", "8,192", "64", "3.2"]
    assert cells(text, "same")[1] == "-0.03 points [-0.19, +0.12]: equal"
    assert cells(text, "low")[1] == "-3.00 points [-3.17, -2.83]: worse"
    assert "margin 0.5 points. Equal: the interval lies within the margin" in text


def test_an_arm_with_a_failure_is_never_equal():
    same: list[float | str] = [0.94, 0.941, 0.942]
    for how, words in (("diverged", "worse (1 of 4 diverged)"), ("failed", "no verdict (1 of 4 failed)")):
        text = markdown(made(("one", same), ("other", [*same, how])))
        assert cells(text, "other")[2:4] == ["0.9410 ± 0.0010 (3)", "1"]
        assert cells(text, "other")[4] == "11 s (3 of 4)"
        assert cells(text, "other")[1].endswith(words)
        text = markdown(made(("one", [*same, how]), ("other", same)))
        assert cells(text, "other")[1].endswith("no verdict (1 of the reference's runs failed)")


def test_a_loss_is_better_when_lower_and_has_no_points():
    text = markdown(made(("one", [0.30, 0.31, 0.32]), ("low", [0.20, 0.21, 0.22]), metric="loss", target=None))
    assert cells(text, "low")[1] == "-0.1000 [-0.1174, -0.0826]: better"
    assert "time to" not in text


def test_the_legend_says_that_runs_sharing_a_device_take_longer():
    found = made(("one", [0.94]), ("other", [0.93]))
    words = "seeds are needed. 3 runs shared each device, so their times are longer than those of a single run.\n"
    assert table({**found, "per_device": 3}).endswith(words)
    assert table({**found, "per_device": 1}) == table(found)  # older results have no such field
    assert "shared" not in table(found)


def test_one_seed_has_no_verdict():
    assert cells(markdown(made(("one", [0.94]), ("other", [0.93]))), "other")[1] == "-1.00 points: no verdict (one seed)"


def test_a_name_with_a_bar_stays_in_its_column():
    found = made(("one", [0.94]), ("a|b", [0.93]))
    assert "| a\\|b |" in markdown(found)
    assert "a|b " in table(found)


def test_a_terminal_gets_aligned_columns_with_the_verdict_second():
    lines = table(made(("one", [0.940, 0.941, 0.942]), ("a long name", [0.91, 0.912, 0.911]))).splitlines()
    assert "|" not in "".join(lines[:4])
    second = len("a long name") + 3
    assert lines[0].startswith("arm" + " " * (second - 3) + "difference from one  ")
    assert lines[3][second:].startswith("-3.00 points [-3.17, -2.83]: worse")
    assert lines[2].index("0.9410 ±") == lines[3].index("0.9110 ±"), "columns are aligned"


def test_mini_results_say_that_they_mean_nothing():
    found = made(("one", [0.94]), ("other", [0.93]))
    assert MINI not in table(found) + markdown(found)
    assert table({**found, "mini": True}).startswith(f"{MINI}\n")
    assert markdown({**found, "mini": True}).startswith(f"**{MINI}**\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "it is not valid JSON"),
        ("[]", "it does not hold a JSON object"),
        ("{}", "does not hold the results of a study"),
        ('{"study": {}, "runs": [], "metric": "accuracy"}', "does not hold the results of a study"),
    ],
)
def test_files_that_do_not_hold_results(mistake, text, words):
    Path("x.json").write_text(text)
    assert words in mistake("study", "x.json", "--table")


def test_the_legend_of_a_loss_says_that_less_is_better():
    assert "Better: above 0" in legend("accuracy", 0.01, 1).replace("better", "Better")
    assert "better: below 0; no worse: below the margin; worse: above the margin, or" in legend("loss", 0.01, 1)


def test_mini_shrinks_the_schedule_of_a_task(tmp_path):
    Path("my_own.py").write_text(
        "import torch\nfrom paceline import Arrays, Task\n"
        "def task():\n    data = lambda: Arrays((torch.randn(64, 5),))\n"
        "    return Task(name='own', train=data, validation=data, model=lambda: torch.nn.Linear(5, 1), unit='points',\n"
        "                objective=lambda m, b: {'loss': m(b[0]).squeeze(1) ** 2},\n"
        "                defaults={'batch_schedule': '0:512 1:1024', 'virtual_workers': 2, 'epochs': 2})\n"
    )
    study = Study(name="s", source="s", task="my_own.py", seeds=(3,), reference="a", arms=(Arm(name="a", options={}),))
    (arm,) = shrink(study).arms
    assert (arm.options["batch_schedule"], arm.options["global_batch"]) == ("0:16 0.5:32", 32)
    assert list_runs(shrink(study))  # this checks the arm


def test_mini_names_the_arm_whose_options_do_not_fit_its_task():
    Path("my_own.py").write_text(
        "import torch\nfrom paceline import Arrays, Task\n"
        "def task():\n    data = lambda: Arrays((torch.randn(64, 5),))\n"
        "    return Task(name='own', train=data, validation=data, model=lambda: torch.nn.Linear(5, 1), unit='points',\n"
        "                objective=lambda m, b: {'loss': m(b[0]).squeeze(1) ** 2})\n"
    )
    arm = Arm(name="b", options={"crop": 2})
    study = Study(name="s", source="study s.toml", task="my_own.py", seeds=(3,), reference="b", arms=(arm,))
    with pytest.raises(UsageError, match=r"^study s.toml, arm 'b': --crop is for built-in image tasks"):
        shrink(study)
