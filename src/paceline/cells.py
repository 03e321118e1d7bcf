"""Notebook cells as the source of code: what to call them, and their lines, also in a process that did not run them.

A cell has a file name that exists nowhere, such as /tmp/ipykernel_4711/123.py; the kernel alone knows its number and its lines.
Does not import torch.
"""

import linecache
import os
import sys
from collections.abc import Iterable

Cells = dict[str, tuple[str, list[str]]]
"""File name -> what to call it, and its lines."""

_known: Cells = {}
"""Cells of the notebook that started this process."""


def name_cell(file: str) -> str:
    """`Cell In[3]` for the file name of a cell; "" for any other file."""
    if file in _known:
        return _known[file][0]
    python = sys.modules.get("IPython")
    shell = python.get_ipython() if python is not None and hasattr(python, "get_ipython") else None
    describe = getattr(getattr(shell, "compile", None), "format_code_name", None)
    named = describe(file) if describe is not None else None
    return " ".join(named) if named else ""


def find_cells(files: Iterable[str]) -> Cells:
    """Those of these files that are not on the disk and have lines that this process knows."""
    missing = {file for file in files if not os.path.exists(file)}
    return {file: (name_cell(file) or file, lines) for file in sorted(missing) if (lines := linecache.getlines(file))}


def add_cells(cells: Cells) -> None:
    """Let tracebacks in this process show the lines of these cells."""
    _known.update(cells)
    for file, (_, lines) in cells.items():
        # Without a modification time, linecache keeps the entry although there is no such file.
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
