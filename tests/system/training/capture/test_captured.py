"""Capture is agreed on by all workers."""

from harness.processes import run_workers
from harness.training import blobs, train_in
from paceline.dist.world import World
from paceline.training import loop, validation
from paceline.training.capture import captured as fast
from unit.training.capture.test_captured import Replayed, _capture, _Plain


def unequal(here: World) -> tuple[list[str], str]:
    """Three parts on two workers, with dropout: one pass here, two there."""
    fast.Graph, fast._why_never = Replayed, lambda run: ""  # type: ignore[misc, assignment]
    fast.find_obstacle = lambda body, inputs, model, objective: (body(inputs), "")
    loop.capture = _capture
    validation._Set = _Plain  # type: ignore[misc]
    fast._Trials._is_long = lambda self, case, graph, batches: False  # type: ignore[method-assign]
    trained = train_in(here, blobs(dropout=0.5), {"virtual_workers": 3, "epochs": 3, "fast": "auto"})
    return trained.watcher.notes, trained.result.model_sha256


def test_workers_that_cannot_all_do_not_wait_for_each_other() -> None:
    (notes, one), (others, other) = run_workers(unequal, 2)
    assert one == other
    assert sorted([notes[0], others[0]])[0].startswith("another worker cannot")
    assert "passes, and a graph has one seed" in sorted([notes[0], others[0]])[1]
