"""Cells of a notebook in messages, in the kernel itself and in a worker."""

import linecache
import sys
from types import ModuleType, SimpleNamespace

import pytest

from paceline import cells
from paceline.explanation import find_user_frame

CELL = "/tmp/ipykernel_4711/99.py"
SOURCE = "def fail():\n    raise KeyError(3)\n"


def raise_in_cell() -> Exception:
    found: dict[str, object] = {}
    exec(compile(SOURCE, CELL, "exec"), found)
    with pytest.raises(KeyError) as raised:
        found["fail"]()  # type: ignore[operator]
    return raised.value


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython in this process has run the cell as its third."""
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=lambda file: ("Cell", "In[3]") if file == CELL else None))
    python = ModuleType("IPython")
    python.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(linecache.cache, CELL, (len(SOURCE), None, SOURCE.splitlines(keepends=True), CELL))


def test_a_worker_knows_the_cells_of_the_kernel(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Cell In[3], line 2, in fail\n    raise KeyError(3)"
    assert find_user_frame(raise_in_cell()) == said
    assert cells.name_cell(__file__) == ""
    sent = cells.find_cells([CELL, __file__, "<nowhere>", "/no/such/file.py"])
    assert sent == {CELL: ("Cell In[3]", SOURCE.splitlines(keepends=True))}  # files on the disk need not be sent
    monkeypatch.delitem(sys.modules, "IPython")
    monkeypatch.delitem(linecache.cache, CELL)
    monkeypatch.setattr(cells, "_known", {})
    assert find_user_frame(raise_in_cell()) == f"{CELL}, line 2, in fail"
    cells.add_cells(sent)
    linecache.checkcache()
    assert find_user_frame(raise_in_cell()) == said
    monkeypatch.delitem(linecache.cache, CELL)


@pytest.mark.parametrize("python", [ModuleType("IPython"), SimpleNamespace(get_ipython=lambda: None)])
def test_ipython_without_a_shell_has_no_cells(python: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", python)
    assert cells.name_cell(CELL) == ""
