"""`paceline completion bash|zsh|fish`: a script that completes verbs, flags, choices and file names in a shell.

The script is generated from the parsers of all verbs and is static: completing does not start Python. zsh uses the bash script.
"""

import argparse
import shlex
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline import cli
from paceline.flags import choices_of, reveal_all
from paceline.toml import packaged_recipes

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument("shell", metavar="|".join(SHELLS), choices=SHELLS, help="the shell to complete in")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "to install it:\n"
        "  echo 'source <(paceline completion bash)' >> ~/.bashrc\n"
        "  echo 'source <(paceline completion zsh)' >> ~/.zshrc\n"
        "  paceline completion fish > ~/.config/fish/completions/paceline.fish"
    )


def run(options: dict[str, Any]) -> int:
    """Print the script."""
    print(make_script(options["shell"]), end="")
    return 0


def make_script(shell: str) -> str:
    """The script that completes `paceline` in a shell."""
    verbs = list_verbs()
    return _fish(verbs) if shell == "fish" else (_ZSH if shell == "zsh" else "") + _bash(verbs)


@dataclass(frozen=True)
class Flag:
    """A flag and what can follow it."""

    names: tuple[str, ...]
    about: str
    takes_value: bool
    values: tuple[str, ...]
    """Known values. If empty, file names are completed."""


@dataclass(frozen=True)
class Verb:
    """A verb, its flags and the known words for its first argument."""

    name: str
    about: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]


def list_verbs() -> list[Verb]:
    """All verbs with what can follow them."""
    _, parsers = cli.make_parser(cli.VERBS)
    return [_list_verb(name, parser) for name, parser in parsers.items()]


def _list_verb(name: str, parser: argparse.ArgumentParser) -> Verb:
    reveal_all(parser)
    shown = [action for action in parser._get_optional_actions() if action.help != argparse.SUPPRESS]
    flags = [Flag(tuple(a.option_strings), _short(a.help), a.nargs != 0, _values(a)) for a in shown]
    words = next((_values(action) for action in parser._get_positional_actions()), ())
    return Verb(name, _short(parser.description), tuple(flags), words)


def _values(action: argparse.Action) -> tuple[str, ...]:
    if action.choices is not None:
        return tuple(map(str, action.choices))
    return _known().get(action.dest) or choices_of(action.dest)


@cache
def _known() -> dict[str, tuple[str, ...]]:
    """Words for arguments that can also be files, and for models."""
    from paceline import models
    from paceline.data.fashion_mnist import SOURCES  # imports numpy

    tasks = tuple(SOURCES)
    return {"task": tasks, "target": tasks, "recipe": tuple(packaged_recipes()), "model": tuple(models.names())}


def _short(text: str | None) -> str:
    """The first sentence of a help text, without its default."""
    return (text or "").replace("%%", "%").partition(". ")[0].partition(" [")[0].rstrip(".")


_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"

_BASH = r"""_paceline() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} verb= words= files= lead= i IFS=$'\n'
    if [[ $cur == "=" ]]; then cur=; elif [[ $prev == "=" ]]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi
    if [[ $cur == --*=* ]]; then prev=${cur%%=*} lead=${cur%%=*}= cur=${cur#*=}; fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        if [[ ${COMP_WORDS[i]} != -* ]]; then verb=${COMP_WORDS[i]}; break; fi
    done
    case $prev in
@VALUES@
    esac
    if [[ -z $words && $cur == -* ]]; then
        case $verb in
@FLAGS@
        esac
    elif [[ -z $words && $prev != -* ]]; then
        case $verb in
@WORDS@
        esac
        case $verb in @TASKS@) files='!*.py' ;; esac
    fi
    COMPREPLY=($(compgen -P "$lead" -W "$words" -- "$cur"))
    if [[ -n $files ]]; then COMPREPLY+=($(compgen -f -X "$files" -- "$cur")); fi
}
complete -o default -F _paceline paceline
"""


def _bash(verbs: list[Verb]) -> str:
    values = {name: flag.values for verb in verbs for flag in verb.flags for name in flag.names if flag.values}
    flags = {verb.name: [name for flag in verb.flags for name in flag.names] for verb in verbs}
    first = [*flags, "help", "version"]
    words = {verb.name: verb.words for verb in verbs if verb.words}
    return (
        _BASH.replace("@VALUES@", _cases(values, 8))
        .replace("@FLAGS@", _cases({**flags, "''": ["--help", "--version"]}, 12))
        .replace("@WORDS@", _cases({**words, "''": first, "help": list(flags)}, 12))
        .replace("@TASKS@", "|".join(verb.name for verb in verbs if verb.words == _known()["task"]))
    )


def _cases(found: dict[str, Any], indent: int) -> str:
    lines = {name: "\\n".join(values) for name, values in found.items()}
    return "\n".join(f"{' ' * indent}{name}) words=$'{words}' ;;" for name, words in lines.items())


def _fish(verbs: list[Verb]) -> str:
    lines = ["complete -c paceline -n __fish_use_subcommand -f"]
    for verb in verbs:
        lines.append(f"complete -c paceline -n __fish_use_subcommand -a {verb.name} -d {shlex.quote(verb.about)}")
        seen = f"complete -c paceline -n '__fish_seen_subcommand_from {verb.name}'"
        if verb.words:
            or_files = "" if verb.words == _known()["task"] else " -f"
            lines.append(f"{seen}{or_files} -a {shlex.quote(' '.join(verb.words))}")
        for flag in verb.flags:
            spelled = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            known = f" -x -a {shlex.quote(' '.join(flag.values))}" if flag.values else " -r" if flag.takes_value else ""
            lines.append(f"{seen} {spelled}{known} -d {shlex.quote(flag.about)}")
    return "\n".join(lines) + "\n"
