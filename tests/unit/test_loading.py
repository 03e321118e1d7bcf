"""The garbage collector is paused while a command loads, and only then."""

import gc
from collections.abc import Iterator

import pytest

from paceline import loading


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    loading._paused = False
    gc.unfreeze()
    gc.enable()


def test_pause_and_resume() -> None:
    loading.pause_collector()
    assert not gc.isenabled()
    loading.resume_collector()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


@pytest.mark.parametrize("enabled", [True, False])
def test_a_callers_collector_is_left_alone(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    loading.load_rest()
    assert gc.isenabled() == enabled
    assert gc.get_freeze_count() == 0
