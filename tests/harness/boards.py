"""Boards and their records: a server in a thread, and folders as runs write them."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.board.board import BoardServer, listen, make_server
from paceline.records import Record

if TYPE_CHECKING:
    from playwright.sync_api import Page

FACTS = {
    **{
        "task": "fashion-mnist-mini",
        "model": "cnn:width=8",
        "workers": 2,
        "virtual_workers": 2,
        "global_batch": 256,
        "part_batch": 128,
    },
    **{"optimizer": "sgd", "steps_per_epoch": 10, "epochs": 4, "total_steps": 40, "peak_lr": 0.1, "seed": 0},
}


@contextmanager
def serving(root: Path, host: str = "127.0.0.1") -> Iterator[BoardServer]:
    """A board of this folder on any free port, until the block ends."""
    with listen(host, 0) as listener:
        server = make_server(root, listener, host, pause_s=0.05)  # with the default pause, tests would mostly wait
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join(timeout=20)
            assert not thread.is_alive(), "the board did not end"


def begin_run(root: Path, name: str, when: str = "2026-03-01T10:00:00+00:00", **facts: Any) -> Record:
    """Start a run, up to its first step: the real writer, with its lock."""
    record = Record(str(root), name)
    about = {"when": when, "task": "fashion-mnist-mini", "versions": {"torch": "2.13.0"}, "contract": FACTS | facts}
    record.write("environment.json", json.dumps(about))
    return record


def add_steps(record: Record, first: int, last: int) -> None:
    """Write rows for these steps, and an epoch row after every tenth."""
    for step in range(first, last + 1):
        record.row(
            {"kind": "step", "step": step, "epoch": 1 + (step - 1) // 10, "lr": 0.1, "time_s": step / 10, "loss": 2.3 / step}
        )
        if step % 10 == 0:
            row = {
                "kind": "epoch",
                "epoch": step // 10,
                "step": step,
                "time_s": step / 10,
                "epoch_time_s": 1.0,
                "samples_per_s": 2560.0,
            }
            record.row({**row, "val_loss": 2.3 / step, "val_accuracy": 1 - 1 / (1 + step)})


def end_run(record: Record, accuracy: float = 0.8, status: str = "done", **more: Any) -> None:
    """Finish the record with a result."""
    metrics = {"accuracy": accuracy, "loss": 1 - accuracy}
    ended = {"status": status, "metrics": metrics, "epochs": 4, "steps": 40, "train_time_s": 4.0, "samples_per_s": 2560.0}
    record.finish(ended | more)


def make_run(root: Path, name: str, accuracy: float = 0.8, status: str = "done", **facts: Any) -> Path:
    """A finished run."""
    record = begin_run(root, name, **facts)
    add_steps(record, 1, 40)
    end_run(record, accuracy, status)
    return record.path


def make_study(root: Path, name: str, arms: dict[str, float], **more: Any) -> Path:
    """A study of one seed: its results, and a record for each arm, with its final accuracy."""
    for arm, accuracy in arms.items():
        make_run(root / name, f"{arm}-seed0", accuracy)
    runs = [
        {"arm": arm, "seed": 0, "status": "done", "metrics": {"accuracy": accuracy}, "contract": {}, "time_to_target_s": None}
        for arm, accuracy in arms.items()
    ]
    study = {"name": name, "task": "fashion-mnist-mini", "seeds": [0], "arms": {arm: {} for arm in arms}, **more}
    study = {"reference": next(iter(arms)), "margin": 0.01, "target_accuracy": None, **study}
    (root / name / "study.json").write_text(json.dumps({"study": study, "metric": "accuracy", "runs": runs, "environment": {}}))
    return root / name


def wait_for_text(page: "Page", selector: str, wanted: list[str]) -> None:
    """Wait until these elements have these texts. Checked at every frame: `expect` waits 0.1 s, then 0.25 s, between checks."""
    from playwright.sync_api import TimeoutError

    script = """([selector, wanted]) => {
        const found = [...document.querySelectorAll(selector)].map(element => element.textContent);
        return JSON.stringify(found) === JSON.stringify(wanted);
    }"""
    with suppress(TimeoutError):
        page.wait_for_function(script, arg=[selector, wanted])
    found = page.locator(selector).all_text_contents()
    assert found == wanted, f"{selector}: {found}, not {wanted}"
