"""Options as command-line flags: one per field of `Config`, and back. `--help` lists the common ones, `--help-all` all."""

import argparse
import ast
import dataclasses
import inspect
import typing
from collections.abc import Mapping
from typing import Any, Literal

from paceline.config import Config, names_with
from paceline.errors import UsageError
from paceline.options import Role, option_of
from paceline.settings import Settings, parse_setting, write_setting
from paceline.values import flag, write_pairs


def add_flags(parser: argparse.ArgumentParser, help_texts: Mapping[str, str] | None = None) -> None:
    """Add one flag per option. A flag that is not given leaves no attribute, so that a recipe or a task can set the option.

    `help_texts` replaces the help of some options, by name. Add a verb's own arguments first: the usage line names them.
    """
    docs, kinds = _docs(), typing.get_type_hints(Config)
    groups: dict[str, Any] = {}
    uncommon: dict[argparse.Action, str] = {}
    for field in dataclasses.fields(Config):
        section = option_of(field).section
        if flag(field.name) in parser._option_string_actions:
            continue  # the verb uses this flag for something else
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        kind, text = kinds[field.name], docs[field.name].replace("%", "%%")
        if field.default not in (None, "", {}):
            text += f" [{field.default}]"
        text = (help_texts or {}).get(field.name, text)
        arguments: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            arguments["action"] = argparse.BooleanOptionalAction
        else:
            arguments["metavar"] = option_of(field).metavar or _metavar(field.name, kind)
        if field.name == "resume":
            arguments |= {"nargs": "?", "const": "auto", "type": _resume}
        if kind is Settings:
            arguments["action"] = _Set
        action = groups[section].add_argument(flag(field.name), **arguments)
        if field.name not in names_with(Role.COMMON) and text != argparse.SUPPRESS:
            uncommon[action], action.help = text, argparse.SUPPRESS
    _add_help_all(parser, uncommon)


def add_task(parser: argparse.ArgumentParser) -> None:
    """Add the task and its recipe."""
    parser.add_argument("task", metavar="TASK", help="fashion-mnist, fashion-mnist-mini, my_task.py or module:function")
    add_recipe(parser)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe that flags override."""
    parser.add_argument("--recipe", metavar="FILE", help="options from a TOML file or a packaged recipe; flags override them")


def to_flags(options: Mapping[str, Any]) -> list[str]:
    """The command-line flags that set these options."""
    flags = []
    for key, value in options.items():
        if isinstance(value, bool):
            flags.append(flag(key) if value else "--no-" + key.replace("_", "-"))
        elif key == "set":
            flags += [f"--set={write_setting(name, each)}" for name, each in (value or {}).items()]
        elif isinstance(value, Mapping):  # a schedule, as a table of TOML
            flags.append(f"{flag(key)}={write_pairs(value)}")
        elif value is not None and (key, value) != ("resume", ""):
            flags.append(f"{flag(key)}={value}")
    return flags


def reveal_all(parser: argparse.ArgumentParser) -> None:
    """Let the help list all options, not just the common ones."""
    for help_all in parser._actions:
        if isinstance(help_all, _HelpAll):
            parser.epilog = None
            for action, text in help_all.uncommon.items():
                action.help = text


def choices_of(name: str) -> tuple[str, ...]:
    """The values that an option can have, if it is a choice."""
    kind = typing.get_type_hints(Config).get(name)
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _add_help_all(parser: argparse.ArgumentParser, uncommon: Mapping[argparse.Action, str]) -> None:
    """Add `--help-all`, which also lists the options that are not common, and say so at the end of `--help`."""
    arguments = " ".join(str(action.metavar or action.dest) for action in parser._get_positional_actions())
    parser.usage = f"%(prog)s {arguments} [options]"
    shown = [action for action in parser._get_optional_actions() if action.help != argparse.SUPPRESS and action.dest != "help"]
    parser.epilog = f"to list all {len(shown) + len(uncommon)} options: {parser.prog} --help-all"
    parser.add_argument("--help-all", action=_HelpAll, uncommon=uncommon)


class _HelpAll(argparse.Action):
    """Print the help of all options and exit."""

    def __init__(self, uncommon: Mapping[argparse.Action, str], **about: Any) -> None:
        super().__init__(**about, nargs=0, default=argparse.SUPPRESS, help="list all options and exit")
        self.uncommon = uncommon

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        reveal_all(parser)
        parser.print_help()
        parser.exit()


class _Set(argparse.Action):
    """`--set key=value`, once for each key."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **parse_setting(values)})


def _metavar(name: str, kind: Any) -> str:
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is Literal:
        return "|".join(kinds)
    return "N" if int in kinds else "X" if float in kinds else name.upper().rsplit("_", 1)[-1]


def _resume(text: str) -> str:
    if not text:
        raise UsageError("--resume= has no value: name a record, or use --resume alone for the newest unfinished one")
    return text


def _docs() -> dict[str, str]:
    """The help of each field: the string below it in the source of `Config`."""
    (tree,) = ast.parse(inspect.getsource(Config)).body
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(text, ast.Expr)
            assert isinstance(text.value, ast.Constant)
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs
