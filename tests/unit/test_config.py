"""One dataclass is the source of flags, recipes and the record: what goes in one way comes back equal the other ways."""

import argparse
import dataclasses
import functools
import math
import tomllib
import typing
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Config, check_options, flag, make_config, merge_options
from paceline.errors import UsageError
from paceline.flags import _docs, add_flags, to_flags
from paceline.settings import Settings, fit_settings
from paceline.toml import read_recipe, to_toml

FIELDS = {field.name: field for field in dataclasses.fields(Config)}
KINDS = typing.get_type_hints(Config)
PLAIN = {
    "nodes": 3,
    "node_id": 2,
    "warmup_steps": 0,
    "warmup_epochs": 0.0,
    "workers_schedule": "",
    "min_workers": None,
    "local_steps": 0,
    "sam_rho": 0.0,
    "target_accuracy": 0.5,
    "monitor": "f1",
}  # what the checks across fields leave alone


def values(name: str) -> st.SearchStrategy[Any]:
    """Values a field may hold."""
    kind = KINDS[name]
    if kind is Settings:
        plain = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
        words = st.text(st.characters(exclude_categories=("Cc", "Cs")))
        nested = st.recursive(
            plain | words, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=5
        )
        return st.dictionaries(st.from_regex(r"[a-z_][a-z_0-9]{0,8}", fullmatch=True), nested, max_size=3)
    if typing.get_origin(kind) is Literal:
        return st.sampled_from(typing.get_args(kind))
    if kind is bool:
        return st.booleans()
    if kind is str:
        plain = st.characters(exclude_categories=("Cc", "Cs"))
        special = {
            "name": st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="/.-"), max_size=40),
            "checkpoint_every": st.sampled_from(("0", "500", "1.5s")),
            "batch_schedule": st.sampled_from(("auto", "auto:512", "0:64 0.5:128", "0:16 1:32 2.25:1024")),
            "step_at": st.sampled_from(("0.5", "0.1,0.9")),
        }
        return special.get(name, st.text(plain))
    if int in (kind, *typing.get_args(kind)):
        return st.integers(2 if name == "snapshots" else 1, 1000)  # one snapshot is an error
    if name == "timeout_s":
        return st.floats(1, 1e7)
    return st.floats(0, 1, exclude_min=True, exclude_max=True)


configs = st.fixed_dictionaries({}, optional={name: values(name) for name in FIELDS if name not in PLAIN}).map(
    lambda options: Config(**PLAIN, **options)
)


@functools.cache
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="x", allow_abbrev=False)
    add_flags(made)
    return made


def parse(flags: list[str]) -> dict[str, Any]:
    return vars(parser().parse_args(flags))


def recipe(folder: Any, text: str) -> str:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@settings(max_examples=60, deadline=None)
@given(config=configs)
def test_toml_reads_back_to_an_equal_config(config, tmp_path_factory):
    path = recipe(tmp_path_factory.getbasetemp(), to_toml(config))
    assert make_config(read_recipe(path)) == config


@settings(max_examples=60, deadline=None)
@given(config=configs)
def test_flags_read_back_to_an_equal_config(config):
    found = make_config(parse(to_flags(vars(config))))
    assert dataclasses.replace(found, set=fit_settings(dict, "dict()", found.set)) == config


@pytest.mark.parametrize("text", ['a"b', "a\\b", "é 火 \U0001f600", "\u2028", "'''", "# no comment"])
def test_odd_text_survives_toml(text, tmp_path):
    assert read_recipe(recipe(tmp_path, to_toml(Config(data_dir=text))))["data_dir"] == text


@pytest.mark.parametrize("name", ["seed", "base_lr", "warmup_from"])
def test_numbers_survive_toml(name):
    most = {"seed": 2**64 - 1, "base_lr": 1e30, "warmup_from": 5e-324}[name]
    assert tomllib.loads(to_toml(Config(**{name: most})))[name] == most


def test_toml_can_leave_options_out():
    found = tomllib.loads(to_toml(Config(workers=2), without=("epochs", "workers")))
    assert {*FIELDS} - {*found} == {"epochs", "workers", *(name for name in FIELDS if getattr(Config(), name) in (None, {}))}


def test_odd_text_survives_flags():
    for text in ("--epochs=3", "-x", "a=b", "", "two words"):
        assert make_config(parse(to_flags({"data_dir": text}))).data_dir == text


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_help_and_a_flag(name):
    action = parser()._option_string_actions[flag(name)]
    assert action.dest == name
    assert len(_docs()[name]) > 10


def test_help_shows_defaults_and_choices(capsys):
    made = argparse.ArgumentParser()
    add_flags(made)
    with pytest.raises(SystemExit):
        made.parse_args(["--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    assert "constant|linear|cosine|one-cycle" in text
    assert "[0.05]" in text
    assert "--no-flip" in text


def test_a_flag_not_given_leaves_nothing_behind():
    assert parse(["--epochs", "3"]) == {"epochs": "3"}


def test_later_layers_win(tmp_path):
    task = {"epochs": 2, "model": "cnn", "flip": True}
    path = recipe(tmp_path, "epochs = 7\nbase_lr = 1\nflip = false\n")
    config = make_config(task, read_recipe(path), parse(["--base-lr", "0.5"]))
    assert (config.epochs, config.base_lr, config.model, config.flip, config.seed) == (7, 0.5, "cnn", False, 0)


def test_none_in_a_layer_is_the_default():
    assert make_config({"global_batch": 64}, {"global_batch": None}).global_batch is None


@pytest.mark.parametrize(
    ("key", "near"), [("epoch", "epochs"), ("baselr", "base_lr"), ("qqqq", "see paceline train --help-all")]
)
def test_an_unknown_key_names_the_nearest(key, near, tmp_path):
    path = recipe(tmp_path, f"{key} = 1\n")
    with pytest.raises(UsageError, match=near) as caught:
        read_recipe(path)
    assert path in str(caught.value)
    with pytest.raises(UsageError, match=near):
        make_config({key: 1})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("epochs = true", "--epochs is True: it must be a whole number"),
        ("epochs = 2.0", "--epochs is 2.0: it must be a whole number"),
        ('epochs = "five"', "--epochs is 'five': it must be a whole number"),
        ("epochs = [1]", "a whole number"),
        ("base_lr = true", "--base-lr is True: it must be a number"),
        ('base_lr = "fast"', "--base-lr is 'fast': it must be a number"),
        ("base_lr = 2024-01-01", "a number"),
        (f"base_lr = {10**400}", "a number"),
        ("flip = 1", "--flip is 1: it must be true or false"),
        ('flip = "true"', "true or false"),
        ("model = 3", "--model is 3: it must be text"),
        ("schedule = 3", "unknown value for --schedule '3'"),
        ('precision = "bf61"', "did you mean 'bf16'"),
        ("workers = 1.5", "--workers is 1.5: it must be a whole number"),
    ],
)
def test_a_wrong_type_in_a_recipe_is_refused(line, words, tmp_path):
    options = read_recipe(recipe(tmp_path, line))
    with pytest.raises(UsageError) as caught:
        make_config(options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_whole_number_may_stand_for_a_number(tmp_path):
    config = make_config(read_recipe(recipe(tmp_path, "base_lr = 1")))
    assert config.base_lr == 1.0
    assert isinstance(config.base_lr, float)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("workers", value) for value in (0, -1)),
        *((name, 0) for name in ("nodes", "reference_batch", "global_batch", "accumulate", "epochs", "patience")),
        *((name, 0) for name in ("log_every", "base_lr")),
        *(
            (name, -1)
            for name in ("node_id", "train_samples", "crop", "loader_workers", "weight_decay", "clip_norm", "eval_batch")
        ),
        *((name, -1) for name in ("warmup_epochs", "warmup_steps", "warmup_from", "max_steps", "seed", "check_every")),
        *((name, value) for name in ("erase", "momentum", "label_smoothing", "target_accuracy") for value in (-0.1, 1.1)),
        *((name, value) for name in ("beta1", "beta2") for value in (-0.1, 1.0, 1.1)),
        *((name, value) for name in ("peak_at",) for value in (-0.1, 1.1)),
        *(
            (name, value)
            for name in ("base_lr", "weight_decay", "timeout_s", "momentum", "warmup_from", "clip_norm", "peak_at")
            for value in (math.nan, math.inf, -math.inf)
        ),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_flag(name, value):
    with pytest.raises(UsageError) as caught:
        make_config({name: value, "schedule": "constant"})
    assert str(caught.value).startswith(flag(name) + " is ")


@pytest.mark.parametrize("fraction", ["erase", "momentum", "label_smoothing", "target_accuracy", "peak_at"])
def test_fractions_include_their_ends(fraction):
    assert getattr(Config(**{fraction: 0.0}), fraction) == 0.0
    assert getattr(Config(**{fraction: 1.0}), fraction) == 1.0


def test_node_id_must_be_one_of_the_nodes():
    assert Config(nodes=2, node_id=1).node_id == 1
    with pytest.raises(UsageError, match="between 0 and 1"):
        make_config({"nodes": 2, "node_id": 2})


@pytest.mark.parametrize("warmup", [{"warmup_epochs": 1.0}, {"warmup_steps": 1}])
def test_one_cycle_with_warm_up_is_refused(warmup):
    with pytest.raises(UsageError, match="one-cycle warms up by itself"):
        make_config(warmup)
    assert Config(schedule="cosine", **warmup).schedule == "cosine"


def test_two_kinds_of_warm_up_are_refused():
    with pytest.raises(UsageError, match="both given"):
        make_config({"schedule": "cosine", "warmup_epochs": 1.0, "warmup_steps": 1})


def test_nesterov_without_momentum_is_plain_sgd():
    assert not Config(momentum=0.0).nesterov
    assert Config(momentum=0.0, optimizer="adamw").nesterov
    assert Config().nesterov


@pytest.mark.parametrize("name", ["../x", "a/b", "/tmp/x", "a/", ".", "..", "-x", "--epochs", "x" * 201, "é" * 101])
def test_a_name_is_no_path(name):
    with pytest.raises(UsageError, match="it must be a plain name") as caught:
        Config(name=name)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("field", ["name", "runs_dir", "data_dir", "resume", "model", "rendezvous", "optimizer"])
@pytest.mark.parametrize("text", ["a\nb", "a\rb", "\x1b[2J", "\0", "\x7f", "\x9b", "\udcff"])
def test_text_that_controls_a_terminal_is_refused_and_never_printed(field, text):
    with pytest.raises(UsageError, match=f"{flag(field)} is .*: it must not contain control characters") as caught:
        check_options({field: text})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "most"),
    [("seed", 2**64 - 1), ("workers", 4096), ("loader_workers", 1024), ("grace_s", 1e7), ("epochs", 10**12), ("base_lr", 1e30)],
)
def test_a_number_too_large_is_refused_by_its_flag(name, most):
    assert getattr(make_config({name: most}), name) == most
    for value in (most * 2, str(10**30 * most), "9" * 5000):
        with pytest.raises(UsageError) as caught:
            make_config({name: value})
        assert str(caught.value).startswith(f"{flag(name)} is ")
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["1000000000000000000", "1e400s", "9e30s", "-1"])
def test_a_checkpoint_is_due_some_day(text):
    with pytest.raises(UsageError, match="--checkpoint-every is"):
        Config(checkpoint_every=text)


def test_resume_with_an_empty_value_is_refused():
    with pytest.raises(UsageError, match="--resume= has no value"):
        parse(["--resume="])
    assert parse(["--resume"]) == {"resume": "auto"}
    table = {"batch_schedule": {"0": 64, "0.5": 128}}
    assert to_flags(table) == ["--batch-schedule=0:64 0.5:128"], "workers get a schedule as text"
    assert to_flags({"resume": "", "epochs": 3}) == ["--epochs=3"], "as a recipe from a record has it"


def test_many_dots_are_not_always_nesting(tmp_path):
    floats = ", ".join(["0.5"] * 100)
    text = f'# {"." * 100}\nstep_at = "{floats}"\n'
    assert read_recipe(recipe(tmp_path, text))["step_at"] == floats


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"x = " + b"[" * 100_000, "nested too deeply"),
        (b"#" * 1_000_001, "larger than 1,000,000 bytes"),
        (b"epochs = " + b"9" * 5000, "not valid TOML"),
        (b"epochs = 0x" + b"f" * 5000, "--epochs is a very large int: it must be at most"),
        (b"base_lr = 0x" + b"f" * 5000, "--base-lr is a very large int: it must be a number"),
        (b"epochs" + b".a" * 3000 + b" = 1", "nested too deeply"),
        (b"[schedule" + b".a" * 3000 + b"]\nx = 1", "nested too deeply"),
        (b"epochs = {a = {b = 1}}", "--epochs is {'a': {'b': 1}}: it must be a whole number"),
        (b"[epochs]\n" + b"".join(b"k%d = 1\n" % i for i in range(10_000)), "it must be a whole number"),
        (b"[schedule]\n" + b"".join(b"k%d = 1\n" % i for i in range(10_000)), "unknown value for --schedule"),
    ],
)
def test_recipes_that_are_no_recipes_are_one_short_line(content, words, tmp_path):
    (tmp_path / "recipe.toml").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        make_config(read_recipe(str(tmp_path / "recipe.toml")))
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_unreadable_recipes(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read recipe .*: No such file"):
        read_recipe(str(tmp_path / "missing.toml"))
    with pytest.raises(UsageError, match="cannot read recipe"):
        read_recipe(str(tmp_path))
    with pytest.raises(UsageError, match="not valid TOML"):
        read_recipe(recipe(tmp_path, "epochs ="))
    (tmp_path / "latin.toml").write_bytes(b'model = "\xff"')
    with pytest.raises(UsageError, match="not valid TOML"):
        read_recipe(str(tmp_path / "latin.toml"))


def test_betas_are_the_optimizers_own_unless_given():
    assert (Config().beta1, Config().beta2) == (0.9, 0.999)
    assert (Config(optimizer="novograd").beta1, Config(optimizer="novograd").beta2) == (0.95, 0.98)
    assert Config(optimizer="novograd", beta2=0.0).beta2 == 0.0
    assert make_config({"optimizer": "novograd"}, {"optimizer": "lamb"}).beta1 == 0.9


@pytest.mark.parametrize("text", ["", "half", "0,0.5", "-1", "nan", "inf", "0.5,1", "0.5,30", "0.5;0.75"])
def test_step_at_is_fractions_of_the_run_or_epochs(text):
    with pytest.raises(UsageError, match=r"--step-at is .*: it must be fractions of the run \(0.5,0.75\) or epochs \(30,60\)"):
        Config(step_at=text)
    assert Config(step_at="1,2.5").step_at == "1,2.5"


@pytest.mark.parametrize("other", [{"sam_rho": 0.1}, {"measure_noise": True}, {"lr_rule": "adascale"}])
def test_local_steps_have_no_common_gradient(other):
    with pytest.raises(UsageError, match="--local-steps cannot be combined with"):
        make_config({"local_steps": 4, **other})


def test_a_mode_needs_a_metric() -> None:
    with pytest.raises(UsageError, match=r"--mode max needs --monitor: .*give both, or neither"):
        make_config({"mode": "max", "save_best": True})
    assert make_config({"mode": "max"}, {"monitor": "f1"}).mode == "max"
    assert make_config({"mode": "auto", "monitor": ""}).mode == "auto"  # as every record's config.toml says


def test_patience_needs_a_target() -> None:
    with pytest.raises(
        UsageError, match=r"--patience 3 does nothing without --target-accuracy: .*give both, or leave.*--stop-after 3"
    ):
        make_config({"patience": 3})
    assert make_config({"patience": 1, "target_accuracy": 0.0}).patience == 1  # as every record's config.toml says
    assert make_config({"patience": 3}, {"target_accuracy": 0.9}).patience == 3
    assert make_config({"patience": 3}, {"patience": 1}).patience == 1


def test_a_choice_takes_one_value() -> None:
    with pytest.raises(UsageError, match=r"--tracker takes one value, not 'wandb,mlflow': choose one"):
        make_config({"tracker": "wandb,mlflow"})


def test_a_batch_schedule_brings_its_global_batch():
    """A recipe or a task may have another one. The schedule may be text or a table; auto keeps it."""
    assert make_config({"global_batch": 32}, {"batch_schedule": "0:8 1:64"}).global_batch == 64
    assert merge_options({"global_batch": 32}, {"batch_schedule": {"0": 8, "1": 64}})["global_batch"] == 64
    assert make_config({"global_batch": 32}, {"batch_schedule": "auto"}).global_batch == 32
    assert make_config({"batch_schedule": "0:8 1:64"}).global_batch is None
    assert make_config({"global_batch": 32}, {"batch_schedule": "0:8 1:64", "global_batch": 48}).global_batch == 48
    assert make_config({"global_batch": 32}, {"batch_schedule": "none"}).global_batch == 32
    for wrong in (5, [1], "x"):
        with pytest.raises(UsageError, match=r"batch.schedule"):
            merge_options({"global_batch": 32}, {"batch_schedule": wrong})
