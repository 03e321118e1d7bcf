"""A Task object from a notebook trains on several workers, in a real kernel. The first cells are those of docs/notebooks.md."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.notebooks import Notebook, open_notebook
from harness.processes import children, tagged
from paceline.training.run import train

PAGE = Path(__file__).parents[2] / "docs" / "notebooks.md"
DEFINE, TRAIN, USE, LOAD, RESUME = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)

WRONG = """import dataclasses


def objective(model, batch):
    print("in the objective")
    raise ValueError("my own mistake")


paceline.train(dataclasses.replace(task, objective=objective), workers=2, name="wrong")
"""
LONG = 'paceline.train(task, workers=2, epochs=100_000, name="long", reduce="exact")'
IN_THREAD = f"import asyncio\nawait asyncio.to_thread(lambda: {LONG})"


@pytest.fixture
def notebook(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """A kernel whose temporary files are in `tmp/`."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    with open_notebook(tmp_path) as opened:
        yield opened


def sha256(name: str) -> str:
    return str(json.loads(Path("runs", name, "result.json").read_text())["model_sha256"])


def test_a_task_from_a_cell(notebook: Notebook, runs: Path) -> None:
    assert notebook.run(DEFINE).error == []
    first = notebook.run(TRAIN)
    assert "Epoch = 3, " in first.out
    assert "all 2 workers agree" in first.out
    assert first.err == ""
    assert re.sub(r"[\d.e-]+}", "#}", first.result) == (
        "Result(status='done', epochs=3, steps=12, metrics={'loss': #}, record='runs/first')"
    )
    Path("line.py").write_text(DEFINE)
    assert sha256("first") == train("line.py", epochs=3, reduce="exact", virtual_workers=2).model_sha256

    assert notebook.run(USE).result.startswith("tensor([[")
    loaded = notebook.run(f"{LOAD}\nmodel.training, torch.equal(model.layer.weight, result.model.layer.weight)")
    assert loaded.result == "(False, True)"
    longer = notebook.run(RESUME)
    assert "extended" in longer.out
    assert "epochs=5" in longer.result

    wrong = notebook.run(WRONG)
    assert "in the objective\n" in wrong.out
    shown = [re.sub(r"worker \d|In\[\d\]", "#", line) for line in wrong.error]
    assert shown == [
        "WorkerFailed: # failed first: ValueError: my own mistake",
        "  Cell #, line 6, in objective",
        '      raise ValueError("my own mistake")',
    ]

    stopped = notebook.run(LONG, interrupt_at="Epoch = 2,")
    assert [re.sub(r"step \d+", "step #", line) for line in stopped.error] == [
        "Stopped: stopped by Ctrl-C after step #; a checkpoint was written; the same command with --resume continues"
    ]
    assert notebook.run("6 * 7").result == "42"
    resumed = notebook.run('paceline.train(task, workers=1, resume="long")', interrupt_at="Epoch = ")  # in the kernel itself
    assert "resumed" in resumed.out
    assert resumed.error[0].startswith("Stopped: stopped by Ctrl-C")
    assert children(notebook.pid) == {}
    assert list(Path("tmp").glob("paceline-*")) == []


def test_a_killed_kernel_takes_its_workers_along(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in another thread than the main one: there are no signal handlers, and its output still reaches the cell."""
    notebook.run(DEFINE)
    for cell, _ in notebook.follow(IN_THREAD):
        if "Epoch = 1," in cell.out:
            break
    workers = children(notebook.pid)
    assert len(workers) == 2
    os.kill(notebook.pid, signal.SIGKILL)
    tag, end = f"PACELINE_AGENT={notebook.pid}", time.monotonic() + 20
    while tagged(tag) and time.monotonic() < end:
        time.sleep(0.1)
    left = tagged(tag)
    for pid in left:
        os.kill(pid, signal.SIGKILL)  # a test that fails leaves no process either
    assert left == []
