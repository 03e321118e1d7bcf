"""`make test` runs every test file: none is in a folder that pytest or the Makefile leaves out."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FOLDERS = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}


def test_pytest_enters_every_folder(pytestconfig: pytest.Config) -> None:
    """Its default leaves out folders called `dist` or `build`."""
    patterns = pytestconfig.getini("norecursedirs")
    left_out = [folder for folder in FOLDERS if any(fnmatch(name, pattern) for name in folder.parts for pattern in patterns)]
    assert not left_out


def test_make_test_names_every_folder() -> None:
    named = (TESTS.parent / "Makefile").read_text().split()
    assert [name for name in sorted({folder.parts[0] for folder in FOLDERS}) if f"tests/{name}" not in named] == []
