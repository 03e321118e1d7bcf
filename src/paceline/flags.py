"""Options as command-line flags: one per field of `Config`, and back."""

import argparse
import ast
import dataclasses
import inspect
import typing
from collections.abc import Mapping
from typing import Any, Literal

from paceline.config import Config
from paceline.errors import UsageError
from paceline.options import option_of
from paceline.values import flag


def add_flags(parser: argparse.ArgumentParser, help_texts: Mapping[str, str] | None = None) -> None:
    """Add one flag per option. A flag that is not given leaves no attribute, so that a recipe or a task can set the option.

    `help_texts` replaces the help of some options, by name.
    """
    docs, kinds = _docs(), typing.get_type_hints(Config)
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        section = option_of(field).section
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        kind, text = kinds[field.name], docs[field.name].replace("%", "%%")
        if field.default not in (None, ""):
            text += f" [{field.default}]"
        text = (help_texts or {}).get(field.name, text)
        arguments: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            arguments["action"] = argparse.BooleanOptionalAction
        else:
            arguments["metavar"] = option_of(field).metavar or _metavar(field.name, kind)
        if field.name == "resume":
            arguments |= {"nargs": "?", "const": "auto", "type": _resume}
        groups[section].add_argument(flag(field.name), **arguments)


def add_task(parser: argparse.ArgumentParser) -> None:
    """Add the task and its recipe."""
    parser.add_argument("task", help="fashion-mnist, fashion-mnist-mini, my_task.py or module:function")
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
        elif value is not None and (key, value) != ("resume", ""):
            flags.append(f"{flag(key)}={value}")
    return flags


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
