"""Help: the common options with `--help`, all with `--help-all`, and what people type who look for help."""

import dataclasses

import pytest

from paceline import cli
from paceline.config import Config, names_with
from paceline.learning_curve.verb import SET_HERE
from paceline.options import Role

FIELDS = frozenset(field.name for field in dataclasses.fields(Config))
COMMON = names_with(Role.COMMON)
HIDDEN = {
    "train": frozenset[str](),
    "advise": frozenset[str](),
    "rehearse": names_with(Role.STUDY) - {"runs_dir"} | {"workers_schedule"},
    "scale": names_with(Role.WHOLE_RUN) - {"mode"},  # its own --mode
    "learning-curve": SET_HERE - {"name"},  # its own --name
}


@pytest.fixture
def show(capsys):
    """Runs a command line that exits by itself; returns its code and what it printed."""

    def call(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.run(argv)
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


def listed(text: str) -> set[str]:
    """The options that a help text lists: those that begin a line."""
    words = [word for line in text.splitlines() if line.startswith("  --") for word in line.split()[:1]]
    return {word.rstrip(",").removeprefix("--").replace("-", "_") for word in words} & FIELDS


@pytest.mark.parametrize("verb", HIDDEN)
def test_help_lists_the_common_options_and_says_where_the_others_are(verb, show):
    code, out, _ = show(verb, "--help")
    assert code == 0
    assert listed(out) == COMMON - HIDDEN[verb] | ({"mode"} if verb == "scale" else set())
    task = "RECORD|TASK" if verb == "advise" else "TASK"
    assert out.startswith(f"usage: paceline {verb} {task} [options]\n")
    flags = cli.make_parser([verb])[1][verb]._option_string_actions
    own = {action for name, action in flags.items() if action.dest not in (*FIELDS, "help", "help_all")}
    assert out.endswith(f"\nto list all {len(own) + len(FIELDS - HIDDEN[verb])} options: paceline {verb} --help-all\n")


@pytest.mark.parametrize("verb", HIDDEN)
def test_help_all_lists_every_option(verb, show):
    code, out, _ = show(verb, "--help-all")
    assert code == 0
    assert listed(out) == FIELDS - HIDDEN[verb]
    assert "--help-all\n" not in out.splitlines()[-1]


@pytest.mark.parametrize("verb", HIDDEN)
def test_a_verb_has_its_own_flags_in_its_help(verb, show):
    own = {"train": "", "advise": "--cluster --speed", "rehearse": "--seeds --margin", "scale": "--mode --windows"}
    own["learning-curve"] = "--sizes --target-error --least-steps"
    out = show(verb, "--help")[1]
    assert all(f"  {name} " in out for name in ["--recipe", *own[verb].split()])


def test_most_runs_need_about_fifteen_options():
    assert 12 <= len(COMMON) <= 17


@pytest.mark.parametrize(("columns", "most"), [("60", 58), ("100", 98), ("300", 110)])
def test_help_is_as_wide_as_the_terminal(columns, most, show, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    lines = show("train", "--help-all")[1].splitlines()
    assert most - 15 < max(map(len, lines)) <= most


def test_a_name_with_dashes_is_not_broken(show, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert not [line for line in show("train", "--help-all")[1].splitlines() if line.endswith("-")]


def test_without_arguments_the_help_is_shown(show):
    code, out, err = show()
    assert code == 2
    assert not out
    assert err == show("--help")[1]


@pytest.mark.parametrize(
    ("argv", "same"),
    [
        (("help",), ("--help",)),
        (("help", "train"), ("train", "--help")),
        (("--help", "train"), ("train", "--help")),
        (("-h", "train", "my_task.py"), ("train", "--help")),
        (("help", "train", "--help-all"), ("train", "--help-all")),
        (("help", "--help"), ("--help",)),
        (("version",), ("--version",)),
        (("-V",), ("--version",)),
    ],
)
def test_other_ways_to_ask(argv, same, show):
    code, out, err = show(*argv)
    assert (code, out, err) == show(*same)
    assert (code, err) == (0, "")


def test_help_about_an_unknown_verb_is_one_line(capsys):
    assert cli.run(["help", "trian"]) == 2
    assert capsys.readouterr().err == "paceline: unknown verb 'trian': did you mean 'train'?\n"
