"""The code in docs/metrics.md runs."""

import re
from pathlib import Path
from typing import Any

import pytest

from harness.training import ALONE, train_in

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
CODE = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)
EXPECTED = {
    "llama": {"loss"},
    "masks": {"loss"},
    "rare": {"loss", "accuracy"},
    "binary": {"loss", "accuracy", "f1", "auc"},
    "line": {"loss", "rmse", "shifted/loss", "shifted/rmse"},
    "text": {"loss", "perplexity"},
}


@pytest.mark.parametrize("code", CODE, ids=lambda code: re.findall(r'name="(\w+)"', code)[0])
def test_an_example_of_the_page_trains(code: str) -> None:
    for library in ("transformers", "torchmetrics"):
        if library in code:
            pytest.importorskip(library, reason=f"install {library}")
    names: dict[str, Any] = {}
    exec(code, names)
    task = names["task"]()
    trained = train_in(ALONE, task, {"epochs": 2, "global_batch": 12, "virtual_workers": 2, "eval_batch": 10, "base_lr": 0.02})
    assert set(trained.result.metrics) == EXPECTED.pop(task.name)
    losses = [row["val_loss"] for row in trained.watcher.epochs]
    assert losses[1] < losses[0]


def test_every_example_ran() -> None:
    assert len(CODE) == 6
