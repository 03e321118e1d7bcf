"""tools/check_english.py finds odd phrases and British spellings, and says where they are."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def english() -> Any:
    """tools/check_english.py as a module."""
    spec = importlib.util.spec_from_file_location("check_english", ROOT / "tools" / "check_english.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "phrase",
    [
        "cut into so many parts",
        "taken anew",
        "is not to be had",
        "where they stop to pay",
        "(default: one a worker)",
        "one value a sample",
        "Every worker reaches this.",
        "which no ratio sees",
        "as always",
        "a normalised gradient",
        "its behaviour",
        "COLOURS = {}",
        "neighbouring epochs",
        "labelled waiting",
    ],
)
def test_odd_phrases_are_found(english: Any, phrase: str) -> None:
    assert len(english.check(Path("page.md"), f"A line.\n{phrase}\n")) == 1


@pytest.mark.parametrize(
    "phrase",
    [
        "one per worker",
        "so many workers that it stops",
        "which no longer exists",
        "a renewed lease",
        "a normalized gradient",
        "raise an error",
        "precise behavior",
        "one at a time",
        "promise",
    ],
)
def test_plain_phrases_pass(english: Any, phrase: str) -> None:
    assert english.check(Path("page.md"), phrase) == []


def test_findings_say_where_and_what_to_write(english: Any) -> None:
    text = "first line\n\n    # compiled every run anew and\n    # for one a\n    # worker\n"
    assert english.check(ROOT / "docs" / "page.md", text) == [
        "docs/page.md:3: 'anew': write 'again'",
        "docs/page.md:4: 'one a worker': write 'per'",
    ]


def test_exit_code(english: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("Plain words.\n")
    bad.write_text("Compiled anew.\n")
    assert english.main([str(good)]) == 0
    assert english.main([str(good), str(bad)]) == 1
    assert "1 phrase(s) to rewrite" in capsys.readouterr().out
