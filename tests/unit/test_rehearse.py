"""A rehearsal: the arms it trains, what it prints, and the recipe it writes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import cli, toml
from paceline import rehearse as rehearsal
from paceline.config import make_config, merge_options
from paceline.rehearse import REFERENCE, make_rehearsal, nearest_recipe, verdict
from paceline.study.study import list_runs, read_base
from paceline.toml import read_recipe

TINY = ("--model", "linear", "--train-samples", "128", "--reference-batch", "16", "--epochs", "1", "--seeds", "2")


@pytest.fixture(autouse=True)
def here(runs: Path) -> None:
    """Records go to the test's own folder."""


@pytest.fixture
def mistake(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must fail with one line on stderr; returns the line."""

    def call(*argv: str) -> str:
        assert cli.run(argv) == 2
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1, err
        return err.removeprefix("paceline: ").rstrip()

    return call


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the packaged recipes."""

    def make(**recipes: str) -> None:
        Path("packaged").mkdir()
        files = {}
        for name, text in recipes.items():
            files[name.replace("_", "-")] = path = Path("packaged", f"{name}.toml")
            path.write_text(text)
        for module in (toml, rehearsal):
            monkeypatch.setattr(module, "packaged_recipes", lambda: files)

    return make


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "rehearse needs --workers: the number of workers to rehearse"),
        (("--workers", "0"), "--workers is 0: it must be at least 1"),
        (("--workers", "4", "--seed", "3"), "--seed cannot be given: rehearse sets it; use --seeds"),
        (("--workers", "4", "--name", "x"), "--name cannot be given: rehearse sets it"),
        (("--workers", "4", "--resume"), "--resume cannot be given: rehearse sets it"),
        (("--workers", "4", "--virtual-workers", "2"), "--virtual-workers 2 is less than --workers 4"),
        (("--workers", "4", "--margin", "0"), "--margin is 0.0: it must be a positive number"),
        (("--workers", "4", "--margin", "x"), "invalid float value"),
        (("--workers", "4", "--seeds", "none"), "--seeds is 'none'"),
        (
            ("--workers", "3", "--global-batch", "100"),
            "arm '3 workers as asked': a global batch of 100 does not divide",
        ),
        (
            ("--workers", "4", "--epochs", "2", "--batch-schedule", "0:64 3:512"),
            "arm '4 workers as asked': --batch-schedule has a phase from epoch 3 on, but the run has 2 epochs",
        ),
        (("--workers", "4", "--workers-schedule", "0:1"), "rehearse trains all parts on one worker, so none can join"),
        (("--workers", "auto", "--batch-schedule", "0:64 1:512"), "give --workers a number, and leave out --workers-schedule"),
        (("--workers", "4", "--recipe", "no.toml"), "cannot read recipe no.toml"),
    ],
)
def test_a_mistake_is_one_line(mistake, runs, argv, words):
    assert words in mistake("rehearse", "fashion-mnist-mini", *argv)
    assert not runs.exists()


def test_it_refuses_to_run_under_another_launcher(mistake, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "start it by itself, not with torchrun" in mistake("rehearse", "fashion-mnist-mini", "--workers", "4")


def test_the_arms_differ_only_in_their_workers(package):
    package()
    study, workers = make_rehearsal("fashion-mnist", {"workers": "64", "base_lr": "0.1", "model": "resnet", "epochs": 9})
    assert (workers, study.reference, study.name) == (64, REFERENCE, "rehearse-fashion-mnist-64")
    reference, large, growing = (dict(arm.options) for arm in study.arms)
    assert growing == {**large, "batch_schedule": "0:1024 0.9:2048 2.7:4096 5.4:8192"}
    assert (reference.pop("virtual_workers"), reference.pop("global_batch")) == (1, 128)
    assert (large.pop("virtual_workers"), large.pop("global_batch")) == (64, 8192)
    assert reference == large == {"base_lr": 0.1, "model": "resnet", "epochs": 9}


def test_a_number_of_workers_replaces_the_schedule_of_a_recipe(package, mistake):
    package()
    Path("r.toml").write_text('workers_schedule = "0:1 1:2"\n')
    options = merge_options(read_base("r.toml"), {"workers": 4})
    study, _ = make_rehearsal("fashion-mnist-mini", options)
    assert not any("workers_schedule" in arm.options for arm in study.arms)
    assert "so none can join" in mistake("rehearse", "fashion-mnist-mini", "--recipe", "r.toml")


def test_the_nearest_recipe_is_an_arm_with_the_users_model_and_epochs(package):
    package(
        batch_4096='global_batch = 4096\nmodel = "cnn"\nepochs = 99\noptimizer = "adamw"\n',
        batch_8192='global_batch = 8192\nschedule = "cosine"\nwarmup_epochs = 2\ncrop = 2\nseed = 3\n',
        speedrun="global_batch = 6400\n",
        batch_none="epochs = 3\n",
    )
    given = {"workers": 50, "model": "resnet", "epochs": 9, "warmup_steps": 7, "schedule": "linear", "flip": False}
    study, _ = make_rehearsal("fashion-mnist", given)
    arm = study.arms[3]
    assert arm.name == "50 workers with batch-8192"
    kept = {"model": "resnet", "epochs": 9, "flip": False, "virtual_workers": 50, "global_batch": 6400}
    assert arm.options == {**kept, "schedule": "cosine", "warmup_epochs": 2, "crop": 2}
    make_config(arm.options)
    assert (nearest_recipe(5000), nearest_recipe(16384), nearest_recipe(16400)) == ("batch-4096", "batch-8192", None)


def test_a_growing_recipe_is_fitted_to_the_batch_the_workers_and_the_epochs(package):
    package(
        batch_8192='batch_schedule = "0:1024 2:8192"\nvirtual_workers = 4\nsmallest_part = 2048\nepochs = 10\n',
        batch_7000="global_batch = 8192\n",
    )
    study, _ = make_rehearsal("fashion-mnist", {"workers": 32, "reference_batch": 128, "epochs": 5})
    arm = study.arms[3]
    assert arm.name == "32 workers with batch-8192"  # of two for the same batch, the one that grows
    fitted = {"batch_schedule": "0:512 1:4096", "smallest_part": 32, "virtual_workers": 32, "global_batch": 4096}
    assert arm.options == {"epochs": 5, **fitted}
    assert list_runs(study)


def test_a_growing_batch_is_compared_with_a_constant_one(package):
    package()
    given = {"workers": 64, "batch_schedule": "0:1024 1:8192"}
    study, _ = make_rehearsal("fashion-mnist", given)
    assert [arm.name for arm in study.arms] == [REFERENCE, "64 workers as asked", "64 workers, constant batch"]
    reference, asked, constant = (arm.options for arm in study.arms)
    assert constant == {"virtual_workers": 64, "global_batch": 8192, "batch_schedule": ""}
    assert asked == {**constant, "batch_schedule": "0:1024 1:8192"}
    assert reference == {"virtual_workers": 1, "global_batch": 128, "batch_schedule": ""}


def test_a_task_of_the_users_own_has_no_recipe_arm_and_its_own_batch(package):
    package(batch_32="global_batch = 32\n")
    Path("my_own.py").write_text(
        "import torch\nfrom paceline import Arrays, Task\n"
        "def task():\n    data = lambda: Arrays((torch.randn(64, 5),))\n"
        "    return Task(name='own', train=data, validation=data, model=lambda: torch.nn.Linear(5, 1), unit='points',\n"
        "                objective=lambda m, b: {'loss': m(b[0]).squeeze(1) ** 2}, defaults={'reference_batch': 8})\n"
    )
    study, _ = make_rehearsal("my_own.py", {"workers": 4})
    assert [arm.options["global_batch"] for arm in study.arms] == [8, 32, 32]
    assert [arm.options.get("batch_schedule") for arm in study.arms] == [None, None, "0:8 1.5:16 3:32"]
    assert study.name == "rehearse-my_own-4"


def test_what_it_prints_and_the_recipe_it_writes(runs, package, capsys):
    package(batch_32='global_batch = 32\nschedule = "cosine"\nwarmup_epochs = 0.5\nbase_lr = 0.02\n')
    argv = ["rehearse", "fashion-mnist-mini", "--workers", "2", *TINY, "--margin", "0.9"]
    assert cli.run(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 virtual workers on one worker: the same model, only slower\n")
    assert [out.count(f"\n2 workers{how} ") for how in (" as asked", ", growing to 32", " with batch-32")] == [1, 1, 1]
    *_, asked, growing, with_recipe, use = out.splitlines()
    assert asked.startswith("2 workers (global batch 32) would reach accuracy 0.")
    assert "(n 2) in 4 steps against 0." in asked
    assert asked.endswith(", equal within 90 points.")
    assert growing.startswith("Growing from 16 to 32 they would reach accuracy 0.")
    assert with_recipe.startswith("With recipe batch-32 they would reach accuracy 0.")
    recipe = runs / "rehearse-fashion-mnist-mini-2" / "recipe.toml"
    assert use == "Use: paceline train fashion-mnist-mini --workers 2 --recipe runs/rehearse-fashion-mnist-mini-2/recipe.toml"
    options = read_recipe(str(recipe))
    assert (options["virtual_workers"], options["global_batch"], options["reference_batch"]) == (
        2,
        32,
        options["reference_batch"],
    )
    assert not {"workers", "name", "runs_dir", "resume", "seed"} & options.keys()
    results = json.loads((recipe.parent / "study.json").read_text())
    best, _ = verdict(results, 2)
    assert best is not None
    found = make_config(options, {"workers": 2})
    assert {name: getattr(found, name) for name in results["study"]["arms"][best]["options"]} == results["study"]["arms"][best][
        "options"
    ]
    assert cli.run(argv) == 0  # nothing is trained twice
    assert "8 runs, 8 already done" in capsys.readouterr().out


def made(**arms: list[float]) -> dict[str, Any]:
    names = {"reference": REFERENCE, "asked": "64 workers as asked", "recipe": "64 workers with batch-8192"}
    runs = [
        {"arm": names[arm], "seed": seed, "status": "done" if value == value else "diverged", "metrics": {"accuracy": value}}
        for arm, values in arms.items()
        for seed, value in enumerate(values)
    ]
    about = {"reference": "one worker", "asked": "", "recipe": "batch-8192"}
    found = {names[arm]: {"about": about[arm], "options": {"global_batch": 8192}} for arm in arms}
    return {"study": {"arms": found, "reference": REFERENCE, "margin": 0.005}, "metric": "accuracy", "runs": runs}


GOOD, LOW = [0.942, 0.943, 0.944], [0.911, 0.912, 0.913]


def test_the_arm_that_loses_no_accuracy_is_recommended():
    best, lines = verdict(made(reference=GOOD, asked=LOW, recipe=GOOD), 64)
    assert best == "64 workers with batch-8192"
    assert lines == [
        "64 workers (global batch 8,192) would reach accuracy 0.9120 ± 0.0010 (n 3) against 0.9430 ± 0.0010 (n 3) for one"
        " worker: -3.10 points [-3.27, -2.93], worse.",
        "With recipe batch-8192 they would reach accuracy 0.9430 ± 0.0010 (n 3): +0.00 points [-0.17, +0.17], equal within 0.5"
        " points.",
    ]


def test_an_arm_with_a_diverged_seed_is_not_recommended():
    best, _ = verdict(made(reference=GOOD, asked=[0.96, 0.96, float("nan")], recipe=GOOD), 64)
    assert best == "64 workers with batch-8192"


def test_a_schedule_in_the_tasks_defaults_is_for_the_large_arms_alone(package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "from paceline import Arrays, Task\nimport torch\n\ndef task():\n    x = torch.zeros(64, 1)\n"
    text += "    return Task(name='t', model=lambda: torch.nn.Linear(1, 1), train=Arrays((x,)), validation=Arrays((x,)),\n"
    text += "        objective=lambda model, batch: {'loss': model(batch[0])[:, 0]},\n"
    text += "        defaults={'batch_schedule': {0: 16, 1: 64}, 'reference_batch': 16})\n"
    (tmp_path / "mine.py").write_text(text)
    study, _ = make_rehearsal("mine.py", {"workers": 4})
    options = [(arm.options["batch_schedule"], arm.options["global_batch"]) for arm in study.arms]
    assert options == [("", 16), ("0:16 1:64", 64), ("", 64)]


def test_if_all_arms_lose_it_says_what_to_try():
    best, lines = verdict(made(reference=GOOD, asked=[float("nan")] * 3, recipe=LOW), 64)
    assert best is None
    assert lines[0] == "64 workers (global batch 8,192) would not finish: worse (3 of 3 diverged)."
    assert lines[-1].startswith(
        "Every arm with 64 workers loses accuracy; '64 workers with batch-8192' loses least. Try fewer workers (--workers 32)"
    )


def test_without_a_verdict_it_names_the_best_arm_so_far():
    best, lines = verdict(made(reference=[0.94], asked=[0.92], recipe=[0.93]), 64)
    assert best == "64 workers with batch-8192"
    assert lines[-1] == "No verdict yet: use more --seeds to get one. The best so far:"


@pytest.mark.parametrize("more", [{"lr_rule": "adascale"}, {"measure_noise": True}, {"local_steps": 2}])
def test_options_that_need_several_workers_are_left_out_of_the_reference(package, more):
    package()
    study, _ = make_rehearsal("fashion-mnist-mini", {"workers": 4, **more}, seeds=(0,), margin=0.005)
    assert list_runs(study)  # this checks every arm
    reference = next(arm for arm in study.arms if arm.name == "reference")
    assert not set(more.items()) & set(reference.options.items())


def test_a_model_without_hidden_layers_has_no_muon_arm(package):
    package(batch_64='global_batch = 64\noptimizer = "muon"\n')
    options = {"workers": 2, "reference_batch": 32}
    for model, arms in (("linear", 3), ("mlp:width=8", 4)):
        study, _ = make_rehearsal("fashion-mnist-mini", {**options, "model": model}, seeds=(0,))
        assert len(study.arms) == arms


def test_a_schedule_of_the_task_is_replaced_by_none_in_every_arm(package):
    package(batch_32="global_batch = 32\n")
    Path("my_own.py").write_text(
        "import torch\nfrom paceline import Arrays, Task\n"
        "def task():\n    data = lambda: Arrays((torch.randn(64, 5),))\n"
        "    return Task(name='own', train=data, validation=data, model=lambda: torch.nn.Linear(5, 1), unit='points',\n"
        "                objective=lambda m, b: {'loss': m(b[0]).squeeze(1) ** 2},\n"
        "                defaults={'reference_batch': 8, 'batch_schedule': '0:8 1:16'})\n"
    )
    study, _ = make_rehearsal("my_own.py", {"workers": 4, "batch_schedule": "none"})
    assert [arm.options.get("batch_schedule") for arm in study.arms] == ["", "", "0:8 1.5:16 3:32"]
    assert list_runs(study)  # this checks every arm
    study, _ = make_rehearsal("my_own.py", {"workers": 4})
    assert [arm.options.get("batch_schedule") for arm in study.arms] == ["", "0:8 1:16", ""]
    assert list_runs(study)
