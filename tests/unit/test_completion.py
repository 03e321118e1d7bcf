"""The scripts for shells hold every verb, flag and choice, and nothing hidden. tests/system runs the one for bash."""

import argparse
import dataclasses

import pytest

from paceline import cli
from paceline.completion import SHELLS, list_verbs, make_script
from paceline.config import Config, flag
from paceline.models import names
from paceline.toml import packaged_recipes


def test_every_verb_is_there_with_its_flags():
    found = {verb.name: {name for each in verb.flags for name in each.names} for verb in list_verbs()}
    assert list(found) == list(cli.VERBS)
    assert {flag(field.name) for field in dataclasses.fields(Config)} < found["train"]
    assert {"--no-flip", "--help-all", "--recipe"} < found["train"]
    assert "--seeds" in found["rehearse"]
    assert "--seed" not in found["rehearse"], "hidden there"
    assert {"--sizes", "--seeds", "--name"} < found["learning-curve"]
    assert not {"--seed", "--train-samples"} & found["learning-curve"], "hidden there"
    assert "--slot" not in found["study"]
    assert "--resume" not in found["scale"]
    assert {"--from", "--to", "--steps"} < found["lr-find"]
    assert "--base-lr" not in found["lr-find"], "it finds it"
    assert {"--toy", "--seeds", "--noise"} < found["toys"]


def test_choices_are_known():
    verbs = {verb.name: verb for verb in list_verbs()}
    values = {name: each.values for each in verbs["train"].flags for name in each.names}
    assert values["--reduce"] == ("fast", "exact")
    assert values["--precision"] == ("auto", "fp32", "bf16", "fp16")
    assert values["--recipe"] == tuple(packaged_recipes())
    assert values["--model"] == tuple(names())
    assert values["--epochs"] == ()
    assert {name: each.values for each in verbs["toys"].flags for name in each.names}["--toy"] == ("line", "minima", "all")
    assert verbs["train"].words == ("fashion-mnist", "fashion-mnist-mini")
    assert verbs["data"].words == ("list", "fetch", "verify")
    takes = {name: each.takes_value for each in verbs["train"].flags for name in each.names}
    assert takes["--epochs"]
    assert takes["--set"]
    assert not takes["--flip"]
    assert not takes["--help-all"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_all_of_it(shell, capsys):
    assert cli.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert script == make_script(shell)
    assert argparse.SUPPRESS not in script
    assert "@" not in script
    for verb in list_verbs():
        assert verb.name in script
        flags = [name for each in verb.flags for name in each.names]
        spelled = [f" -{'l' if name[1] == '-' else 's'} {name.lstrip('-')} " for name in flags] if shell == "fish" else flags
        assert not [name for name in spelled if name not in script]
    assert ("bashcompinit" in script) == (shell == "zsh")


def test_an_unknown_shell_is_one_line(capsys):
    assert cli.run(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
