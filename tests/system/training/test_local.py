"""Local steps on any number of workers."""

from typing import Any

from harness.processes import run_workers
from harness.training import Trained, blobs, train_in
from paceline.dist.world import World, world
from unit.training.test_local import FOUR, assert_close


def workers(world: World) -> list[Trained]:
    """Checked after every step: only where all hold the same weights could that pass. (Adam makes whole steps of the rounding
    errors that are the gradient of a bias before batch norm.)
    """
    adamw = {"optimizer": "adamw", "base_lr": 0.01, "clip_norm": 1.0}
    cases: list[tuple[bool, dict[str, Any]]] = [(True, {}), (False, adamw), (True, {"parts_at_once": 1, "accumulate": 2})]
    options = {**FOUR, "check_every": 1, "local_after": 0.2, "base_lr": 0.02, "ema": 0.5}
    return [train_in(world, blobs(norm=norm), {**options, **more}) for norm, more in cases]


def test_any_number_of_workers() -> None:
    with world() as here:
        expected = workers(here)
    for found in zip(*run_workers(workers, 3), expected, strict=True):
        assert len({trained.result.model_sha256 for trained in found[:3]}) == 1
        assert_close(found[0], found[3])
