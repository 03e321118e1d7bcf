"""Run cells in a real Jupyter kernel, as a notebook does."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

from jupyter_client.manager import start_new_kernel


@dataclass
class Cell:
    """What a cell shows."""

    out: str = ""
    err: str = ""
    result: str = ""
    error: list[str] = field(default_factory=list)
    """The lines of the error that ended it, without colors."""


class Notebook:
    """A running kernel."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager, self._client = manager, client

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def run(self, code: str, interrupt_at: str = "", timeout_s: float = 90) -> Cell:
        """Run a cell to its end. Interrupts the kernel once this text is in its output."""
        return next(cell for cell, ended in self.follow(code, interrupt_at, timeout_s) if ended)

    def follow(self, code: str, interrupt_at: str = "", timeout_s: float = 90) -> Iterator[tuple[Cell, bool]]:
        """Run a cell; yields what it shows so far after each message, and whether it has ended."""
        message, cell, end = self._client.execute(code), Cell(), time.monotonic() + timeout_s
        while True:
            assert time.monotonic() < end, f"the cell did not end: {cell}"
            with suppress(Empty):
                yield cell, self._read(self._client.get_iopub_msg(timeout=1), message, cell)
            if interrupt_at and interrupt_at in cell.out:
                interrupt_at = ""
                self.manager.interrupt_kernel()

    def _read(self, found: Any, message: str, cell: Cell) -> bool:
        kind, content = found["msg_type"], found["content"]
        if found["parent_header"].get("msg_id") != message:
            return False
        if kind == "stream":
            cell.out += content["text"] if content["name"] == "stdout" else ""
            cell.err += content["text"] if content["name"] == "stderr" else ""
        elif kind == "execute_result":
            cell.result = content["data"]["text/plain"]
        elif kind == "error":
            cell.error = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"])).splitlines()
        return bool(kind == "status" and content["execution_state"] == "idle")


@contextmanager
def open_notebook(folder: Path) -> Iterator[Notebook]:
    """Start a kernel in a folder. It is killed at the end."""
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(folder), stderr=open(folder / "kernel.log", "w"))  # noqa: SIM115
    try:
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
