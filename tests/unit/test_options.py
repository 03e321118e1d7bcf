"""Options say what they are: each has a section, a role and bounds; a Config knows which of them it was given."""

import argparse
import ast
import copy
import dataclasses
import pickle
import typing
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config import Config, make_config, names_with
from paceline.errors import UsageError
from paceline.flags import add_flags
from paceline.options import EFFECTS, Role, option, option_of
from paceline.rehearse import make_rehearsal
from paceline.scale import scale
from paceline.study.study import parse_settings, read_base

FIELDS = {field.name: field for field in dataclasses.fields(Config)}
KINDS = typing.get_type_hints(Config)


@pytest.mark.parametrize("name", FIELDS)
def test_every_option_has_a_section_and_says_what_depends_on_it(name):
    about = option_of(FIELDS[name])
    assert about.section
    assert len(about.roles & EFFECTS) == 1, "exactly one of MODEL, ROUNDING, TIMING and OPERATION"


@pytest.mark.parametrize("name", FIELDS)
def test_every_number_has_a_lower_bound_and_its_default_fits(name):
    about, kinds = option_of(FIELDS[name]), typing.get_args(KINDS[name]) or (KINDS[name],)
    about.check(name, FIELDS[name].default)
    assert (about.at_least is not None or about.more_than is not None) == bool({int, float} & set(kinds))


@pytest.mark.parametrize("role", Role)
def test_every_role_is_used(role):
    assert names_with(role)
    assert names_with(role) < FIELDS.keys()


def test_the_help_has_one_heading_per_section():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    titles = [group.title for group in parser._action_groups if group._group_actions][1:]
    assert titles == list(dict.fromkeys(option_of(field).section for field in FIELDS.values()))


@pytest.mark.parametrize(
    ("bounds", "bad", "rule"),
    [
        ({"at_least": 1}, 0, "it must be at least 1"),
        ({"at_least": 1, "at_most": 4096}, 5000, "it must be at least 1 and at most 4,096"),
        ({"at_least": 0, "less_than": 1}, 1.0, "it must be at least 0 and less than 1"),
        ({"more_than": 0}, 0.0, "it must be more than 0"),
        ({}, 10**13, "it must be at most 1,000,000,000,000"),
        ({}, -1e31, "it must be at most 1e+30"),
    ],
)
def test_a_number_out_of_bounds_is_refused_with_the_whole_rule(bounds, bad, rule):
    about = option_of(option("section", 1, Role.MODEL, **bounds))
    with pytest.raises(UsageError) as caught:
        about.check("base_lr", bad)
    assert str(caught.value) == f"--base-lr is {bad}: {rule}"


@pytest.mark.parametrize("name", sorted(names_with(Role.STUDY)))
def test_a_study_and_a_rehearsal_set_these_themselves(name, tmp_path):
    with pytest.raises(UsageError, match=name):
        parse_settings([f"{name}=1"])
    with pytest.raises(UsageError, match=name.replace("_", "-")):
        make_rehearsal("fashion-mnist-mini", {"workers": 2, name: 1})
    (tmp_path / "recipe.toml").write_text(f"{name} = 1\nepochs = 3\n")
    assert read_base(str(tmp_path / "recipe.toml")) == {"epochs": 3}


@pytest.mark.parametrize("name", sorted(names_with(Role.WHOLE_RUN)))
def test_scale_has_no_use_for_these(name):
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} does not apply to scale"):
        scale._check({name: 1}, {"mode": "weak", "windows": 3, "window_s": 1.0})


def test_a_config_remembers_what_it_was_given():
    config = Config(epochs=5, optimizer="sgd", workers=None)
    assert config.given == {"epochs", "optimizer"}, "also what equals the default; None is not given"
    assert make_config({"epochs": 2}, {"base_lr": "0.5"}).given == {"epochs", "base_lr"}
    assert config == Config()
    assert hash(config) == hash(Config())
    assert repr(config) == repr(Config())
    assert "given" not in vars(config) | dataclasses.asdict(config)


def test_replace_keeps_what_was_given():
    config = Config(optimizer="sgd", workers=2)
    changed = replace(config, seed=1, workers=None)
    assert (changed.seed, changed.workers, changed.optimizer) == (1, None, "sgd")
    assert changed.given == {"optimizer", "seed"}
    assert replace(Config(momentum=0.0), seed=1).given == {"momentum", "seed"}, "not nesterov and the betas that follow"
    with pytest.raises(UsageError, match="--epochs is 0"):
        replace(config, epochs=0)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_a_copy_is_as_good_as_the_config(again):
    config = Config(epochs=3)
    assert again(config) == config
    assert again(config).given == {"epochs"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        again(config).epochs = 4


def test_nothing_but_the_fields_lists_options():
    """Roles replace lists of option names: no tuple, list or set in the package names five or more options."""
    package = Path(__file__).parents[2] / "src" / "paceline"
    found = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [item.value for item in getattr(node, "elts", ()) if isinstance(item, ast.Constant)]
            if len(names) >= 5 and all(name in FIELDS for name in names):
                found.append(f"{path.relative_to(package)}:{node.lineno}")
    assert not found
