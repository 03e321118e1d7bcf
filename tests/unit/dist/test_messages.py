"""Which failure caused the others, and the messages between workers and launcher."""

import json
import os
import signal

import pytest
import torch.distributed as dist
from torch._utils import ExceptionWrapper

from paceline.dist.launch import start_as_worker
from paceline.dist.messages import (
    Failure,
    ask_to_stop,
    claim_first,
    failed_first,
    first_failure,
    is_lost_contact,
    read_failures,
    read_first,
    read_record_path,
    read_started,
    read_stop,
    read_unfinished,
    send_failure,
    send_finished,
    send_record_path,
    send_started,
)
from paceline.errors import Diverged, Stopped, UsageError
from paceline.explanation import explain


class DistBackendError(RuntimeError):
    """torch's errors are recognized by name, so that torch need not be imported."""


class DistStoreError(RuntimeError):
    """..."""


class DistNetworkError(RuntimeError):
    """..."""


LOST = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4821")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_MESSAGES", str(tmp_path))
    return tmp_path


def failed(rank: int, when: float, *, lost: bool = False) -> Failure:
    return Failure(rank, when, 1, f"failure of {rank}", lost)


def test_an_own_error_comes_before_lost_contact():
    assert first_failure([failed(0, 1.0, lost=True), failed(1, 2.0)], {0: 1, 1: 1}).rank == 1


def test_an_own_error_comes_before_a_kill():
    assert first_failure([failed(1, 2.0)], {0: -signal.SIGKILL, 1: 1}).rank == 1


def test_the_earliest_own_error_counts():
    assert first_failure([failed(0, 3.0), failed(1, 1.5), failed(2, 2.0), failed(3, 1.0, lost=True)], {}).rank == 1


def test_a_killed_worker_is_the_cause_of_lost_contact():
    found = first_failure([failed(0, 1.0, lost=True), failed(2, 1.1, lost=True)], {0: 1, 1: -signal.SIGKILL, 2: 1})
    assert (found.rank, found.exit_code) == (1, 1)
    assert found.text.startswith("worker 1 was killed by SIGKILL")
    assert "out of memory" in found.text


def test_another_signal_is_named_without_a_guess():
    assert first_failure([], {3: -signal.SIGSEGV}).text == "worker 3 was killed by SIGSEGV"


def test_a_missing_instruction_has_a_cause_and_a_fix():
    text = first_failure([], {2: -signal.SIGILL, 0: -signal.SIGTERM}, {0}).text
    assert text.startswith("worker 2 was killed by SIGILL: this CPU or virtual machine lacks an instruction that torch's")
    assert text.endswith("use --precision fp32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16")


def test_workers_ended_by_the_launcher_are_not_blamed():
    """On several nodes, worker 0 may have lost contact with another node; our own launcher then ends worker 1."""
    found = first_failure([failed(0, 1.0, lost=True)], {0: 1, 1: -signal.SIGTERM}, {1})
    assert found.rank == 0
    assert first_failure([], {0: -signal.SIGTERM, 1: -signal.SIGTERM}, {0}).text == "worker 1 was killed by SIGTERM"
    assert first_failure([failed(0, 1.0, lost=True)], {0: 1, 1: -signal.SIGTERM}, ()).text == "worker 1 was killed by SIGTERM"


def test_exit_code_0_before_the_end_comes_before_lost_contact():
    found = first_failure([failed(0, 1.0, lost=True)], {0: 1, 1: 0})
    assert (found.rank, found.exit_code) == (1, 1)
    assert found.text.startswith("worker 1 ended with exit code 0 before the run was done: does the task call sys.exit")


def test_an_error_of_a_loader_process_is_one_line_with_its_frame(folder):
    """The text of torch's error is the traceback of that process."""
    try:
        raise KeyError("no such sample")
    except KeyError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(KeyError) as caught:
        wrapped.reraise()
    send_failure(1, caught.value)
    (found,) = read_failures(folder)
    assert found.text == "worker 1 failed first: KeyError: 'no such sample'"
    assert found.where.endswith(
        'in test_an_error_of_a_loader_process_is_one_line_with_its_frame\n    raise KeyError("no such sample")'
    )
    assert "in DataLoader worker process 0" in found.traceback, "the process's own traceback is still there"


def test_workers_that_are_not_done_are_known(folder, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert read_unfinished(folder) == set()
    send_started()
    assert read_unfinished(folder) == {1}
    send_finished()
    assert read_unfinished(folder) == set()


def test_an_exit_without_a_message_is_named():
    found = first_failure([failed(0, 1.0, lost=True)], {0: 1, 1: 7})
    assert found.text == "worker 1 ended with exit code 7 and no error message"
    assert found.exit_code == 1


def test_lost_contact_alone_is_the_earliest():
    assert first_failure([failed(0, 2.0, lost=True), failed(1, 1.0, lost=True)], {0: 1, 1: 1}).rank == 1


def test_no_message_and_no_exit_code_is_still_a_failure():
    found = first_failure([], {})
    assert found.exit_code == 1
    assert "without an error message" in found.text


def test_a_failure_comes_back_as_it_was_sent(folder):
    assert send_failure(2, UsageError("no such thing"))
    assert send_failure(0, Diverged("the loss is nan"))
    first, second = read_failures(folder)
    assert (first.rank, first.exit_code, first.text, first.lost_contact) == (0, 3, "the loss is nan", False)
    assert (second.rank, second.exit_code, second.text, second.lost_contact) == (2, 2, "no such thing", False)
    assert second.when <= first.when


def test_an_error_is_sent_with_its_frame_and_its_traceback(folder):
    def buggy() -> None:
        raise LookupError("a bug")

    with pytest.raises(LookupError) as caught:
        buggy()
    assert send_failure(1, caught.value)
    (found,) = read_failures(folder)
    assert (found.text, found.exit_code) == ("worker 1 failed first: LookupError: a bug", 1)
    assert found.where.endswith(', in buggy\n    raise LookupError("a bug")')
    assert found.traceback.startswith("Traceback")
    assert found.traceback.endswith("LookupError: a bug")
    assert not found.unexplained
    assert (
        found.explain(folder).describe().splitlines()[-1]
        == f"(for the whole traceback, add --traceback, or see {folder}/result.json)"
    )


def test_lost_contact_is_marked(folder):
    send_failure(0, LOST)
    (found,) = read_failures(folder)
    assert found.lost_contact
    assert found.text.startswith("worker 0 lost contact with another worker: RuntimeError: ")
    assert "\n" not in found.explain().describe()


def test_an_error_without_a_line_of_the_users_is_shown_with_its_traceback(folder):
    send_failure(1, ValueError("no traceback, so nobody's"))
    (found,) = read_failures(folder)
    assert found.unexplained
    assert found.explain().describe().splitlines()[1:-1] == ["ValueError: no traceback, so nobody's"]


class Counter:
    """Stands in for the store that torchrun's workers share."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, key: str, amount: int) -> int:
        self.count += amount
        return self.count

    def set(self, key: str, value: str) -> None:
        pass


class Gone:
    """... when the worker that hosted it has ended."""

    def add(self, key: str, amount: int) -> int:
        raise DistNetworkError("failed to recv, got 0 bytes")


def test_only_the_first_error_of_a_world_is_the_first():
    store, errors = Counter(), [ValueError("1"), UsageError("2")]
    for error in (LOST, KeyboardInterrupt(), Stopped("asked to", "SIGTERM")):
        claim_first(store, error)  # not a worker's own error: that one may come later
        assert failed_first(error) is None
    for error in errors:
        assert failed_first(error) is None
        claim_first(store, error)
    assert [failed_first(error) for error in errors] == [True, False]


def test_without_a_store_an_error_is_printed_rather_than_lost():
    error = ValueError("x")
    claim_first(Gone(), error)
    assert failed_first(error)


def test_without_a_launcher_no_message_is_sent(monkeypatch, tmp_path):
    monkeypatch.delenv("PACELINE_MESSAGES", raising=False)
    assert not send_failure(0, UsageError("x"))
    send_record_path(tmp_path)
    send_started()
    start_as_worker()
    assert not list(tmp_path.iterdir())


def test_a_launcher_that_is_gone_causes_no_second_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_MESSAGES", str(tmp_path / "gone"))
    assert not send_failure(0, UsageError("x"))


def test_the_record_is_known_to_the_launcher(folder):
    assert read_record_path(folder) is None
    send_record_path(folder / "runs" / "x")
    assert read_record_path(folder) == folder / "runs" / "x"
    assert read_failures(folder) == []


def test_a_worker_killed_as_it_says_where_the_record_is(folder, monkeypatch):
    """Half a path, or an empty one, is not a record: the next attempt would resume the folder it is in."""

    def killed(path, target):
        raise InterruptedError

    monkeypatch.setattr("pathlib.Path.replace", killed)
    with pytest.raises(InterruptedError):
        send_record_path(folder / "runs" / "x")
    assert read_record_path(folder) is None
    (folder / "record").touch()
    assert read_record_path(folder) is None


def test_messages_are_json(folder):
    send_failure(0, Diverged("one\ntwo"))
    assert json.loads((folder / "0.json").read_text())["text"] == "one\ntwo"


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        RuntimeError("Connection reset by peer"),
        RuntimeError("sendBytes failed: Broken pipe"),
        RuntimeError("NCCL communicator was aborted: remote peer exited"),
        RuntimeError("connect() failed: Connection refused"),
        RuntimeError("[..] Timed out waiting 600000ms for recv operation to complete"),
        DistBackendError(
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600001 milliseconds"
        ),
        DistBackendError("NCCL error: remote process exited or there was a network error"),
        DistStoreError("wait timeout after 600000ms, keys: /default_pg/0//1"),
        DistNetworkError("failed to recv, got 0 bytes"),
    ],
)
def test_lost_contact_is_known_by_its_words(error):
    assert is_lost_contact(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory"),
        RuntimeError("DataLoader timed out after 30 seconds"),
        DistBackendError("Duplicate GPU detected: rank 1 and rank 0 both on CUDA device 1000"),
        ValueError("connection reset"),
        UsageError("broken pipe"),
    ],
)
def test_other_errors_are_a_workers_own(error):
    assert not is_lost_contact(error)


def test_an_error_of_the_users_is_their_own_whatever_it_says():
    def download() -> None:
        raise RuntimeError("download failed: connection refused by bucket")

    with pytest.raises(RuntimeError) as caught:
        download()
    assert not is_lost_contact(caught.value)
    assert not is_lost_contact(RuntimeError("Original Traceback (most recent call last):\nRuntimeError: connection refused"))


def test_the_error_of_the_worker_that_failed_first_reaches_the_others():
    store = dist.HashStore()
    assert read_first(store) is None
    claim_first(store, ValueError("mine"))
    claim_first(store, ValueError("a later one"))
    assert read_first(store).why == "ValueError: mine"


class Unprintable(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_that_cannot_be_printed_has_its_name():
    assert not is_lost_contact(Unprintable())
    assert explain(Unprintable()).why == "Unprintable"


def test_a_killed_worker_is_blamed_before_a_bare_exit_code():
    assert "worker 1 was killed by SIGKILL" in first_failure([], {0: 1, 1: -9}).text
    assert "worker 2 was killed by SIGSEGV" in first_failure([], {0: -15, 1: 1, 2: -11}).text
    assert "worker 1 ended with exit code 1" in first_failure([], {0: -15, 1: 1}).text


def test_a_signal_without_a_name():
    assert "worker 0 was killed by signal 99" in first_failure([], {0: -99}).text


def waited(rank: int, when: float) -> Failure:
    return Failure(rank, when, 1, f"worker {rank} waited", lost_contact=True, waited=True)


@pytest.mark.parametrize("code", [-signal.SIGTERM, -signal.SIGKILL])
def test_the_worker_that_the_others_waited_for_hung(code):
    found = first_failure([waited(0, 1.0), failed(2, 1.1, lost=True)], {0: 1, 1: code, 2: 1}, {1})
    assert (found.rank, found.exit_code) == (1, 1)
    assert found.text.startswith("worker 1 hung: the others waited for it")


def test_before_the_run_has_begun_it_may_only_be_slow():
    found = first_failure([waited(1, 1.0)], {0: -signal.SIGTERM, 1: 1}, {0}, begun=False)
    assert found.text == (
        "worker 0 was not ready for the first step: the others waited for it; if it was still loading data, raise --timeout-s"
    )
    assert first_failure([waited(1, 1.0)], {0: -signal.SIGSEGV, 1: 1}, begun=False).text == "worker 0 was killed by SIGSEGV"


def test_a_worker_that_shows_where_it_hangs_comes_first():
    assert first_failure([waited(0, 1.0), failed(1, 2.0)], {0: 1, 1: 1}).rank == 1


def test_a_crash_while_others_wait_is_not_a_hang():
    assert first_failure([waited(0, 1.0)], {0: 1, 1: -signal.SIGSEGV}).text == "worker 1 was killed by SIGSEGV"


def test_a_timeout_is_marked_as_a_wait(folder):
    send_failure(0, RuntimeError("Timed out waiting 600000ms for recv operation to complete"))
    send_failure(1, LOST)
    assert [(failure.lost_contact, failure.waited) for failure in read_failures(folder)] == [(True, True), (True, False)]


def test_a_request_to_stop_reaches_the_workers(folder):
    assert read_stop(folder) == ""
    ask_to_stop(folder, "SIGTERM")
    assert read_stop(folder) == "SIGTERM"
    ask_to_stop(folder / "gone", "SIGTERM")  # a launcher's folder that cannot be written to is not a second error


def test_workers_that_have_started_are_known(folder):
    assert read_started(folder) == []
    send_started()
    assert read_started(folder) == [os.getpid()]
    assert read_failures(folder) == []
