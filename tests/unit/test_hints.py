"""A flag or key of another tool is answered with the one to use here, and what it means; a typo with the nearest name."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest

import paceline
from paceline import cli, models
from paceline.config import Config, check_options, make_config
from paceline.errors import UsageError, unknown
from paceline.hints import ANSWERS, TABLE, VERBS, find_hint, named_options
from paceline.optim import OPTIMIZERS, check_optimizer
from paceline.study.study import parse_settings
from paceline.toml import read_recipe
from paceline.training.task import Task

KEYS = frozenset(field.name for field in dataclasses.fields(Config))
TYPED = """
    lr learning-rate batch-size batch b bs per-device-batch-size micro-batch gpus gpu devices nproc-per-node nproc world-size
    ngpus num-gpus num-workers num-nodes nnodes node-rank master-addr master-port rdzv-endpoint fold k-fold wd dropout amp fp16
    bf16 mixed-precision compile ddp distributed strategy accelerator device cpu cuda output-dir out save-dir log-dir
    checkpoint-dir max-epochs num-epochs epoch gradient-accumulation-steps accum grad-clip max-grad-norm warmup scheduler
    lr-scheduler optim deterministic random-seed verbose v quiet debug val-batch-size early-stopping ckpt load wandb tensorboard
    config dataset sync-bn ema-decay label-smooth
    EarlyStopping early_stopping callbacks ModelCheckpoint save_top_k report_to mlflow class-weights
"""
"""What users of other tools type."""


@functools.cache
def flags_of(verb: str) -> frozenset[str]:
    return frozenset(cli.make_parser([verb])[1][verb]._option_string_actions)


def refusal(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        cli._parse(argv)
    return str(caught.value)


@pytest.mark.parametrize("names", TABLE)
def test_every_option_that_an_answer_names_exists(names):
    answer, flags = TABLE[names], flags_of("train")
    assert named_options(answer) or answer.startswith("not "), "an answer says what to use, or that nothing is"
    for name in named_options(answer):
        assert name in KEYS or name in ("recipe", "traceback")
    for name in names.split():
        said = find_hint(f"--{name}", flags)
        assert "{" not in said
        assert set(re.findall(r"--[a-z0-9-]+", said)) <= flags
        assert "{" not in find_hint(name.replace("-", "_"), KEYS).replace("set = {", "")


@pytest.mark.parametrize("name", ANSWERS)
def test_the_table_has_none_of_our_own_names(name):
    assert f"--{name}" not in flags_of("train")
    assert name == name.lower().replace("_", "-")


EXAMPLES = sorted({found for answer in TABLE.values() for found in re.findall(r"\{(\w+)=([^{}]*[a-z0-9][^{}]*)\}", answer)})


@pytest.mark.parametrize(("name", "value"), EXAMPLES)
def test_the_values_in_answers_are_valid(name, value):
    assert len(EXAMPLES) > 8
    _, options = cli._parse(["train", "x.py", f"--{name.replace('_', '-')}", value])
    assert check_options({name: options[name]})
    if name == "model":
        models.check(value)


def test_the_answers_say_what_is_true_of_the_options():
    for schedule in ("cosine", "linear", "constant"):
        make_config({"schedule": schedule, "warmup_epochs": 1})
    with pytest.raises(UsageError, match="one-cycle warms up by itself"):
        make_config({"warmup_epochs": 1})
    assert Config.schedule == "one-cycle"
    assert find_hint("--optim", flags_of("train")).count(",") == 4
    for name in ("sgd", "adamw", "lars", "lamb", "novograd", "muon"):
        check_optimizer(name)


@pytest.mark.parametrize("verb", ["train", "rehearse", "scale", "advise"])
def test_what_users_of_other_tools_type_is_answered(verb):
    flags = flags_of(verb)
    nearest = [name for name in TYPED.split() if find_hint(f"--{name}", flags).startswith("did you mean")]
    assert nearest == ["epoch"]
    assert all(find_hint(f"--{name}", flags) for name in TYPED.split())
    assert find_hint("-b", flags) == find_hint("--batch-size", flags)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--lr", "use --base-lr (the learning rate at --reference-batch"),
        ("--batch-size", "use --global-batch (samples per step over all workers) or --reference-batch"),
        ("--gpus", "use --workers N"),
        ("--num-workers", "use --loader-workers (DataLoader processes per worker); --workers is"),
        (
            "--fold",
            "cross-validation is not available: let task(fold) in your task file choose the samples, and train",
        ),
        ("--fp16", "use --precision fp16 (autocast with a loss scale that adjusts itself)"),
        ("--LR", "use --base-lr"),
        ("--learning_rate", "use --base-lr"),
        ("--wrokers", "did you mean --workers?"),
        ("--hidden", "see paceline train --help-all, or use --set hidden=VALUE if your task() takes it"),
        ("--num-layers", "see paceline train --help-all, or use --set num-layers=VALUE if your task() takes it"),
        ("--qqq-www", "see paceline train --help-all"),
        ("--heads", "see paceline train --help-all"),
        ("--3d", "see paceline train --help-all"),
    ],
)
def test_the_answer_to_a_flag(typed, words):
    assert refusal("train", "my_task.py", f"{typed}=3").startswith(f"unknown flag {typed}: {words}")


def test_a_flag_is_answered_although_its_value_looks_like_the_task():
    assert refusal("train", "--lr", "0.1", "my_task.py").startswith("unknown flag --lr: use --base-lr")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("lr", "unknown key 'lr': use base_lr (the learning rate at reference_batch; lr_rule scales"),
        ("batch_size", "unknown key 'batch_size': use global_batch (samples per step over all workers) or reference_batch"),
        ("bf16", "unknown key 'bf16': use precision = \"bf16\" "),
        ("fold", "train with set = {fold = 0}, then set = {fold = 1}"),
        ("cfg", "unknown key 'cfg': use --recipe FILE"),
        ("epoch", "unknown key 'epoch': did you mean 'epochs'?"),
        ("qqqq", "unknown key 'qqqq': see paceline train --help-all"),
        ("q" * 5000, "q...': see paceline train --help-all"),
    ],
)
def test_the_answer_to_a_key_wherever_it_is_given(key, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(f"{key} = 1\n")
    calls = (
        lambda: read_recipe("recipe.toml"),
        lambda: make_config({key: 1}),
        lambda: Config(**{key: 1}),
        lambda: Task(name="x", train=list, validation=list, objective=lambda model, batch: {}, defaults={key: 1}),
        lambda: paceline.train("fashion-mnist-mini", **{key: 1}),
        lambda: parse_settings([f"{key}=1"]),
    )
    for call in calls:
        with pytest.raises(UsageError) as caught:
            call()
        assert words in str(caught.value)


@pytest.mark.parametrize("names", VERBS)
def test_verbs_of_other_tools(names):
    verb, *rest = VERBS[names].split()[1:]
    assert verb in cli.VERBS
    assert {word for word in rest if word.startswith("--")} <= flags_of(verb)
    for name in names.split():
        assert name not in cli.VERBS
        assert refusal(name, "x") == f"unknown verb '{name}': use {VERBS[names]}"


def test_a_study_takes_the_options_of_its_runs_with_set():
    said = "see paceline study --help; options of its runs are given with --set, such as --set epochs=3"
    assert refusal("study", "x.toml", "--epochs", "3") == f"unknown flag --epochs: {said}"
    assert refusal("study", "x.toml", "--lr", "3") == f"unknown flag --lr: {said}"
    assert refusal("study", "x.toml", "--seed", "3") == "unknown flag --seed: did you mean --seeds?"


def test_a_name_that_is_only_slightly_similar_is_not_suggested():
    assert "known: adamw" in str(unknown("optimizer", "adagrad", OPTIMIZERS))
    assert "did you mean 'adamw'?" in str(unknown("optimizer", "adam", OPTIMIZERS))


def test_other_verbs_get_no_answers_about_training():
    assert refusal("doctor", "--wandb") == "unknown flag --wandb: see paceline doctor --help"
    assert refusal("plan", "x", "--cluster", "here", "--gpus", "8") == "unknown flag --gpus: see paceline plan --help"
