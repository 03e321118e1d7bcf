"""Two processes that want the same file download it once."""

import multiprocessing

from paceline.data.download import fetch
from unit.data import test_download as unit_tests
from unit.data.test_download import SHA256, assert_done

server = unit_tests.server


target = unit_tests.target


def test_two_processes_download_once(server, target):
    spawn = multiprocessing.get_context("spawn")
    both = [spawn.Process(target=fetch, args=([server.url("hold")], target, SHA256)) for _ in range(2)]
    both[0].start()
    assert server.asked.wait(20)
    both[1].start()
    # While the first is held, a second request can only come from a process that does not respect the lock; give it a chance.
    server.asked_again.wait(1.0)
    server.go_on.set()
    for process in both:
        process.join(20)
    assert [process.exitcode for process in both] == [0, 0]
    assert server.ranges == [None]
    assert_done(target)
