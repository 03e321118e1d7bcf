"""Process groups and signal names, with real processes."""

import signal
import subprocess
import sys

from harness.engines import alive, wait_for
from paceline.dist.process import has_members, signal_name


def test_a_group_has_members_while_one_of_them_runs():
    """A zombie is none: the launcher would wait for it in vain where process 1 collects nobody."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    assert has_members(child.pid)
    child.kill()
    wait_for(lambda: not alive(child.pid), 10, lambda: "the child still runs")
    assert not has_members(child.pid)
    child.communicate()
    assert not has_members(child.pid)


def test_signals_have_names():
    assert [signal_name(number) for number in (signal.SIGILL, 9, 99)] == ["SIGILL", "SIGKILL", "signal 99"]
