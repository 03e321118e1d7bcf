"""Options as TOML: recipes, by file or by the name of one that ships with the package, and what a record keeps.

Nothing here imports torch.
"""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.errors import UsageError, unknown
from paceline.values import short

_MOST_BYTES = 1_000_000
_MOST_DOTS = 50  # of a key; the parser's memory grows with their square


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """A TOML file's content; a UsageError of one line, which calls it `what`, where there is none."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UsageError(f"{what} is larger than {_MOST_BYTES:,} bytes: it is not a file of options")
        if any(map(_is_deep, content.splitlines())):
            raise RecursionError
        return tomllib.loads(content.decode())
    except OSError as error:
        raise UsageError(f"cannot read {what}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{what} is not valid TOML: {short(str(error), 200)}") from None
    except ValueError:  # Python's limit of 4300 digits
        raise UsageError(f"{what} is not valid TOML: a number is too long") from None
    except RecursionError:
        raise UsageError(f"{what} is not valid TOML: its values are nested too deeply") from None


def _is_deep(line: bytes) -> bool:
    key = line.partition(b"=")[0].strip()
    return key.count(b".") > _MOST_DOTS and b"," not in key and not key.startswith(b"#")


def read_recipe(name: str) -> dict[str, Any]:
    """The options in a TOML file, or in the packaged recipe of that name: keys are Config's fields."""
    path = Path(name)
    if path.name == name and not path.suffix and not path.exists():
        packaged = packaged_recipes()
        if name not in packaged:
            error = unknown("recipe", name, packaged)
            listed = "" if "known: " in str(error) else f" (packaged: {', '.join(packaged)})"
            raise UsageError(f"{error}{listed}, or give a file's name")
        path = packaged[name]
    options = read_toml(path, f"recipe {name}")
    known = {field.name for field in dataclasses.fields(Config)}
    for key in options:
        if key not in known:
            raise UsageError(f"recipe {name}: {unknown('key', key, known)}")
    return options


def packaged_recipes() -> dict[str, Path]:
    """The recipes that come with Paceline, by name."""
    return {file.stem: file for file in sorted((Path(__file__).parent / "recipes").glob("*.toml"))}


def to_toml(config: Config) -> str:
    """The configuration as TOML that `--recipe` reads back to an equal Config."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return "".join(f"{name} = {_value(value)}\n" for name, value in values.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(
            "\\" + c if c in '"\\' else c if c.isprintable() else f"\\U{ord(c):08x}" for c in value
        )  # a basic string: TOML knows no raw control characters
        return f'"{escaped}"'
    return repr(value)
