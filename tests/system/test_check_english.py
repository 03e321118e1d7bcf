"""The English check asks git which files there are."""

from typing import Any

from unit.test_check_english import ROOT
from unit.test_check_english import english as english


def test_tracked_files_leave_out_those_that_quote_phrases(english: Any) -> None:
    names = english.tracked()
    assert str(ROOT / "README.md") in names
    assert str(ROOT / "tools" / "check_english.py") not in names
