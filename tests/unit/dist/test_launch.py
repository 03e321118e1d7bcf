"""Which failure was the first, and how workers report theirs."""

import json
import os
import signal

import pytest

from paceline.config import Config
from paceline.dist.launch import (
    Report,
    _record,
    _rendezvous,
    first_failure,
    is_lost_contact,
    read_reports,
    report_failure,
    report_record,
    start_as_worker,
)
from paceline.errors import Diverged, UsageError

LOST = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4821")


@pytest.fixture
def reports(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_REPORTS", str(tmp_path))
    return tmp_path


def report(rank: int, when: float, *, lost: bool = False) -> Report:
    return Report(rank, when, 1, f"report of {rank}", lost)


def test_an_own_error_comes_before_lost_contact():
    assert first_failure([report(0, 1.0, lost=True), report(1, 2.0)], {0: 1, 1: 1}).rank == 1


def test_an_own_error_comes_before_a_kill():
    assert first_failure([report(1, 2.0)], {0: -signal.SIGKILL, 1: 1}).rank == 1


def test_the_earliest_own_error_counts():
    assert first_failure([report(0, 3.0), report(1, 1.5), report(2, 2.0), report(3, 1.0, lost=True)], {}).rank == 1


def test_a_killed_worker_is_the_cause_of_lost_contact():
    found = first_failure([report(0, 1.0, lost=True), report(2, 1.1, lost=True)], {0: 1, 1: -signal.SIGKILL, 2: 1})
    assert (found.rank, found.exit_code) == (1, 1)
    assert found.text.startswith("worker 1 was killed by SIGKILL")
    assert "out of memory" in found.text


def test_another_signal_is_named_without_a_guess():
    assert first_failure([], {3: -signal.SIGSEGV}).text == "worker 3 was killed by SIGSEGV"


def test_an_exit_without_a_report_is_said_so():
    found = first_failure([report(0, 1.0, lost=True)], {0: 1, 1: 7})
    assert found.text == "worker 1 ended with exit code 7 and left no report"
    assert found.exit_code == 1


def test_lost_contact_alone_is_the_earliest():
    assert first_failure([report(0, 2.0, lost=True), report(1, 1.0, lost=True)], {0: 1, 1: 1}).rank == 1


def test_nothing_at_all_is_still_a_failure():
    found = first_failure([], {})
    assert found.exit_code == 1
    assert "without saying why" in found.text


def test_a_report_comes_back_as_it_was(reports):
    assert report_failure(2, UsageError("no such thing"))
    assert report_failure(0, Diverged("the loss is nan"))
    first, second = read_reports(reports)
    assert (first.rank, first.exit_code, first.text, first.lost_contact) == (0, 3, "the loss is nan", False)
    assert (second.rank, second.exit_code, second.text, second.lost_contact) == (2, 2, "no such thing", False)
    assert second.when <= first.when


def test_a_report_of_a_bug_has_the_traceback(reports):
    def buggy() -> None:
        raise LookupError("a bug")

    with pytest.raises(LookupError) as caught:
        buggy()
    assert report_failure(1, caught.value)
    (found,) = read_reports(reports)
    assert found.text.startswith("worker 1 failed first:\nTraceback")
    assert "in buggy" in found.text
    assert found.text.endswith("LookupError: a bug")
    assert found.exit_code == 1


def test_a_report_of_lost_contact_is_marked(reports):
    report_failure(0, LOST)
    assert read_reports(reports)[0].lost_contact


def test_without_a_launcher_nobody_is_told(monkeypatch, tmp_path):
    monkeypatch.delenv("PACELINE_REPORTS", raising=False)
    assert not report_failure(0, UsageError("x"))
    report_record(tmp_path)
    start_as_worker()
    assert not list(tmp_path.iterdir())


def test_a_launcher_that_is_gone_is_no_second_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_REPORTS", str(tmp_path / "gone"))
    assert not report_failure(0, UsageError("x"))


def test_the_record_is_known_to_the_launcher(reports):
    assert _record(reports) is None
    report_record(reports / "runs" / "x")
    assert _record(reports) == reports / "runs" / "x"
    assert read_reports(reports) == []


def test_reports_are_json(reports):
    report_failure(0, UsageError("one\ntwo"))
    assert json.loads((reports / "0.json").read_text())["text"] == "one\ntwo"


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        RuntimeError("Connection reset by peer"),
        RuntimeError("sendBytes failed: Broken pipe"),
        RuntimeError("NCCL communicator was aborted: remote peer exited"),
        RuntimeError("connect() failed: Connection refused"),
    ],
)
def test_lost_contact_is_known_by_its_words(error):
    assert is_lost_contact(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory"), ValueError("connection reset"), UsageError("broken pipe")]
)
def test_other_errors_are_a_workers_own(error):
    assert not is_lost_contact(error)


def test_one_node_meets_on_a_free_port():
    assert _rendezvous(Config(workers=4)) == {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "local_addr": "127.0.0.1",
    }


def test_nodes_meet_where_the_user_says(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "other")
    monkeypatch.setenv("MASTER_PORT", "1")
    found = _rendezvous(Config(nodes=2, node_id=1, rendezvous="node0:29500", timeout_s=5))
    assert found["rdzv_endpoint"] == "node0:29500"
    assert found["rdzv_configs"] == {"rank": 1, "timeout": 5}


def test_nodes_meet_at_the_master(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert _rendezvous(Config(nodes=2))["rdzv_endpoint"] == "node0:29500"


@pytest.mark.parametrize("rendezvous", ["", "node0", "node0:", ":29500", "node0:http"])
def test_nodes_that_do_not_know_where_to_meet(rendezvous, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UsageError, match="--nodes 2 needs to know where node 0 is: give --rendezvous HOST:PORT"):
        _rendezvous(Config(nodes=2, rendezvous=rendezvous))


def test_a_worker_without_its_launcher_ends_at_once(reports, monkeypatch):
    """Its parent is not the agent it was started by, so the agent is gone already."""
    ended: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setenv("PACELINE_AGENT", str(os.getpid()))
    monkeypatch.setattr("paceline.dist.launch.ctypes.CDLL", lambda _: type("C", (), {"prctl": lambda *_: 0}))
    monkeypatch.setattr(os, "_exit", ended.append)
    try:
        start_as_worker()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended == [1]


def test_a_killed_worker_is_blamed_before_a_bare_exit_code():
    assert "worker 1 was killed by SIGKILL" in first_failure([], {0: 1, 1: -9}).text
    assert "worker 2 was killed by SIGSEGV" in first_failure([], {0: -15, 1: 1, 2: -11}).text
    assert "worker 1 ended with exit code 1" in first_failure([], {0: -15, 1: 1}).text


def test_a_signal_without_a_name():
    assert "worker 0 was killed by signal 99" in first_failure([], {0: -99}).text
