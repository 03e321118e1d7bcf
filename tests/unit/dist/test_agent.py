"""How workers ended: on their own, or because the launcher ended them after another one had failed."""

import signal

import pytest

from paceline.dist.agent import _Agent


@pytest.mark.parametrize(("closing_s", "ended_from_here"), [(0.2, {2, 3}), (5.1, {1, 2, 3})])
def test_a_worker_that_was_killed_before_anyone_here_kills_died_first(closing_s: float, ended_from_here: set[int]) -> None:
    """Its process may end a moment after that of a worker that lost contact with it. The launcher sends SIGTERM, and SIGKILL
    only 5 s later."""
    agent = object.__new__(_Agent)
    agent.kill_after_s, agent._before, agent._closing_s = 5, {0: 1}, closing_s
    agent._ended = lambda: {0: 1, 1: -signal.SIGKILL, 2: -signal.SIGTERM, 3: 1}  # type: ignore[method-assign]
    assert agent.exits().terminated == ended_from_here
