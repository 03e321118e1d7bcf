"""Process groups and signal names, with real processes."""

import signal
import subprocess
import sys

from harness.engines import wait_for
from harness.processes import alive
from paceline.dist.process import group_is_running, signal_name


def test_a_group_is_running_until_its_last_process_ends():
    """A zombie does not count: where process 1 does not reap it, the launcher would wait forever."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    assert group_is_running(child.pid)
    child.kill()
    wait_for(lambda: not alive(child.pid), 10, lambda: "the child still runs")
    assert not group_is_running(child.pid)
    child.communicate()
    assert not group_is_running(child.pid)


def test_signals_have_names():
    assert [signal_name(number) for number in (signal.SIGILL, 9, 99)] == ["SIGILL", "SIGKILL", "signal 99"]
