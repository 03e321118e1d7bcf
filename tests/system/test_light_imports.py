"""What answers at once imports nothing heavy: torch takes seconds to load."""

import sys

import pytest

from harness.processes import run
from paceline import cli

UNKNOWN_MODEL = """
from paceline import errors, models
models.names()
try:
    models.check("resnt")
except errors.UsageError:
    pass
else:
    raise AssertionError
"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import paceline; dir(paceline)", {"torch", "numpy"}),
        ("import paceline.records as records; records.environment()", {"torch"}),
        ("import paceline.data.verb", {"torch"}),
        (UNKNOWN_MODEL, {"torch"}),
        ("import paceline.plan.plan, paceline.advise.advise", {"torch"}),
        ("import paceline.report.page, paceline.report.read", {"torch", "plotly"}),
        ("import paceline.toys", {"torch"}),
        ("import paceline.board.board", {"torch", "starlette", "uvicorn", "plotly"}),
    ],
)
def test_importing_it_loads_nothing_heavy(code: str, heavy: set[str]) -> None:
    check(code, heavy)


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        *([name, "--help"] for name in cli.VERBS),
        ["train", "fashion-mnist", "--epochs", "0"],
        ["trian"],
        ["study", "missing.toml"],
        ["toys", "--seeds", "0"],
        ["rehearse", "fashion-mnist"],
        ["learning-curve", "fashion-mnist", "--sizes", "5"],
    ],
)
def test_help_and_mistakes_load_nothing_heavy(argv: list[str]) -> None:
    code = f"from paceline import cli\ntry:\n    cli.run({argv!r})\nexcept SystemExit:\n    pass\n"
    check(code, {"torch", "numpy", "rich"})


def check(code: str, heavy: set[str]) -> None:
    done = run([sys.executable, "-c", f"import sys\n{code}\nprint(sorted({heavy} & sys.modules.keys()))"])
    assert done.returncode == 0, done
    assert done.stdout.splitlines()[-1] == "[]"
