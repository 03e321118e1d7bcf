"""Options as TOML: recipes, given by file or by the name of a packaged one, and the record's `config.toml`.

Nothing here imports torch.
"""

import dataclasses
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import tomli_w

from paceline.config import Config
from paceline.errors import UsageError, unknown
from paceline.hints import unknown_key
from paceline.values import short

_MOST_BYTES = 1_000_000
_MOST_DOTS = 50  # in a key; the parser's memory grows with their square


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of a TOML file. A UsageError of one line, which calls the file `what`, if it cannot be read."""
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
    """The options in a TOML file, or in the packaged recipe of that name. Keys are the fields of `Config`."""
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
            raise UsageError(f"recipe {name}: {unknown_key(key, known)}")
    return options


def packaged_recipes() -> dict[str, Path]:
    """The recipes that come with Paceline, by name."""
    return {file.stem: file for file in sorted((Path(__file__).parent / "recipes").glob("*.toml"))}


def to_toml(config: Config, without: Collection[str] = ()) -> str:
    """The options, except those named in `without`, as TOML. `--recipe` reads all of them back to an equal Config."""
    options = {name: value for name, value in dataclasses.asdict(config).items() if name not in without}
    return tomli_w.dumps({name: value for name, value in options.items() if value is not None and value != {}})
