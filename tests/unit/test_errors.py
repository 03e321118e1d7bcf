"""The error tree: exit codes, suggestions and printable messages."""

import inspect

import pytest

from paceline import errors
from paceline.errors import PacelineError, RecordError, UsageError, reason, unknown


def test_a_near_name_is_suggested():
    assert str(unknown("model", "resnett", ["cnn", "resnet"])) == "unknown model 'resnett': did you mean 'resnet'?"


def test_the_nearest_of_several_is_suggested():
    assert "'wide-resnet'" in str(unknown("model", "wide-resne", ["resnet", "wide-resnet", "course-wide-resnet"]))


def test_without_a_near_name_all_are_listed_in_order():
    assert str(unknown("optimizer", "zzz", ["sgd", "adamw"])) == "unknown optimizer 'zzz': known: adamw, sgd"


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "a\x07b", "a\x9bb", "a\udcffb", "a\u202eb", "a\rb"])
def test_a_message_cannot_control_the_terminal(text):
    for kind in (PacelineError, UsageError, RecordError):
        assert str(kind(text)).isprintable()


def test_a_users_mistake_is_one_line_and_a_workers_traceback_keeps_its_lines():
    assert str(UsageError("a\nb")) == "a\\nb"
    assert str(PacelineError("a\n\tb é 火")) == "a\n\tb é 火"


def test_a_very_long_name_is_cut(monkeypatch):
    assert len(str(unknown("task", "x" * 10**6, ["sgd"]))) < 200


def test_an_unknown_name_is_the_users_mistake():
    assert unknown("x", "y", []).exit_code == 2


@pytest.mark.parametrize(
    ("name", "code"),
    [("PacelineError", 1), ("UsageError", 2), ("DataError", 1), ("RecordError", 1), ("WorkersDisagree", 1), ("Diverged", 3)],
)
def test_exit_codes(name, code):
    assert getattr(errors, name).exit_code == code


def test_every_error_is_in_the_tree():
    members = inspect.getmembers(errors, inspect.isclass)
    classes = [value for _, value in members if value.__module__ == errors.__name__]
    assert len(classes) >= 6
    assert all(issubclass(value, PacelineError) and value.__doc__ for value in classes)


def test_the_reason_of_an_error_is_one_line():
    assert reason(FileNotFoundError(2, "No such file or directory", "x")) == "No such file or directory"
    assert reason(OSError("no number")) == "no number"
    assert reason(ValueError("two\n lines")) == "two lines"
    assert reason(ValueError()) == "ValueError"
