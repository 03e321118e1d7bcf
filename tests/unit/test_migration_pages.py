"""The migration pages and docs/own-loop.md show the code of the examples, and count its lines right."""

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIRS = {
    "own-loop": ("mnist/plain.py", "mnist/own_loop.py"),
    "migrate-ddp": ("migrate/ddp_before.py", "migrate/ddp_after.py"),
    "migrate-accelerate": ("migrate/accelerate_before.py", "migrate/accelerate_after.py"),
}


def code(name: str) -> str:
    """A file without its docstring."""
    return (ROOT / "examples" / name).read_text().split('"""', 2)[2]


def count(before: str, after: str) -> tuple[int, int]:
    """Lines that are new or changed, and lines that are changed or gone."""
    texts = [[line for line in code(name).splitlines() if line.strip()] for name in (before, after)]
    lines = list(difflib.unified_diff(*texts, lineterm="", n=0))[2:]
    return sum(line[0] == "+" for line in lines), sum(line[0] == "-" for line in lines)


@pytest.mark.parametrize(("page", "pair"), PAIRS.items(), ids=PAIRS)
def test_the_diff_is_that_of_the_examples(page: str, pair: tuple[str, str]) -> None:
    before, after = pair
    lines = difflib.unified_diff(*(code(name).splitlines() for name in pair), lineterm="", n=1)
    hunks = [" ..." if line.startswith("@@") else line for line in lines][3:]
    added, removed = count(*pair)
    said = f"{added} lines are new or changed, and {removed} are changed or gone, without blank lines."
    shown = "\n".join([f"<!-- {before} -> {after}: begin -->", "```diff", *hunks, "```", "", said])
    assert f"{shown}\n<!-- {before} -> {after}: end -->" in (ROOT / "docs" / f"{page}.md").read_text()


def test_lightnings_page_shows_both_files() -> None:
    text = (ROOT / "docs" / "migrate-lightning.md").read_text()
    pair = ("migrate/lightning_before.py", "migrate/lightning_after.py")
    for name in pair:
        assert f"<!-- {name}: begin -->\n```python\n{code(name).strip()}\n```\n<!-- {name}: end -->" in text
    added, removed = count(*pair)
    said = f"Of the task's code, {added} lines are new or changed; {removed} lines of the module are gone or changed."
    assert said in re.sub(r"\s+", " ", text)
