"""Access control and what a board serves, over real sockets, as a browser would ask."""

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from harness.boards import add_steps, begin_run, end_run, make_run, serving
from paceline.board import board
from paceline.board.board import BoardServer, board_verb, is_loopback, listen
from paceline.errors import UsageError
from paceline.report.page import SCRIPTS, asset

TIMEOUT_S = 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    make_run(folder, "one")
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoardServer]:
    """One board for all tests that change nothing."""
    folder = tmp_path_factory.mktemp("served")
    make_run(folder, "one")
    with serving(folder) as server:
        yield server


def ask(server: BoardServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Send a request exactly as written, which a normal client might change."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=TIMEOUT_S)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    connection.close()
    return found


class Stream:
    """A browser's stream of events."""

    def __init__(self, server: BoardServer, query: str = "", **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", urlsplit(server.url).port, timeout=TIMEOUT_S)
        self._connection.request("GET", f"/events?{query}", headers=headers)
        self._answer = self._connection.getresponse()
        self.said = ""
        assert self._answer.status == 200

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.close()
        self._connection.close()

    def until(self, event: str, wanted: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        """The next event of this name for which `wanted` is true."""
        end = time.monotonic() + TIMEOUT_S
        while True:
            assert time.monotonic() < end, f"no such {event}"
            fields = self.next()
            if fields.get("event") == event and wanted(found := json.loads(fields["data"])):
                return {**found, "_id": fields.get("id", "")}

    def next(self) -> dict[str, str]:
        fields: dict[str, str] = {}
        while line := self._answer.readline().decode().rstrip("\n"):
            self.said += line
            name, _, value = line.partition(": ")
            fields[name] = value
        return fields

    def is_over(self) -> bool:
        while line := self._answer.readline():
            del line
        return True


def test_serves_the_page_with_a_policy_that_lets_nothing_else_in(served: BoardServer) -> None:
    status, headers, text = ask(served, "/")
    assert status == 200
    assert "<title>Paceline board</title>" in text
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "set-cookie" not in headers
    for name in SCRIPTS:
        assert text.index(f'<script src="assets/{name}" defer>') < text.index('src="assets/board.js"')
        status, headers, script = ask(served, f"/assets/{name}")
        assert (status, headers["content-type"], script) == (200, "text/javascript; charset=utf-8", asset(name))
    plotly = text.partition('src="assets/plotly-')[2].partition('"')[0]
    status, headers, script = ask(served, f"/assets/plotly-{plotly}")
    assert (status, len(script) > 1_000_000) == (200, True)
    assert "immutable" in headers["cache-control"]
    assert "content-security-policy" in headers


def test_a_folder_with_markup_in_its_name_is_text(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)"
    folder.mkdir()
    with serving(folder) as server:
        assert "<script>alert" not in ask(server, "/")[2]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "localhost", "127.0.0.1:1", "localhost.evil:{port}", ""]
)
def test_another_host_name_is_refused(served: BoardServer, host: str) -> None:
    status, headers, text = ask(served, "/", Host=host.format(port=urlsplit(served.url).port))
    assert status == 403
    assert "<" not in text
    assert "content-security-policy" in headers


@pytest.mark.parametrize("host", ["localhost:{port}", "127.0.0.1:{port}", "[::1]:{port}", "LocalHost:{port}"])
def test_this_machines_names_are_allowed(served: BoardServer, host: str) -> None:
    assert ask(served, "/", Host=host.format(port=urlsplit(served.url).port))[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_the_board_is_read_only(served: BoardServer, method: str) -> None:
    for path in ("/", "/events", "/nowhere"):
        status, headers, text = ask(served, path, method)
        assert (status, text) == (405, "the board is read-only: GET and HEAD\n")
        assert "content-security-policy" in headers


def test_saves_a_page_of_the_selected_records(root: Path) -> None:
    with serving(root) as server:
        status, headers, text = ask(server, "/report?run=one&run=../one&run=nothing")
        assert ask(server, "/report?run=nothing")[0] == ask(server, "/report")[0] == 404
    assert status == 200
    assert headers["content-disposition"].startswith("attachment")
    assert "<!doctype html>" in text.lower()[:100]


def test_head_is_answered(served: BoardServer) -> None:
    assert ask(served, "/", "HEAD")[::2] == (200, "")


def test_a_board_for_others_needs_its_token(root: Path) -> None:
    with serving(root, "0.0.0.0") as server:
        token = server.url.partition("?token=")[2]
        assert len(token) >= 32
        for path in ("/", "/events", "/assets/board.js", f"/?token={token[:-1]}", "/?token=", "/?token=%C3%A9", "/nowhere"):
            assert ask(server, path)[0] == 403, path
        status, headers, _ = ask(server, f"/?token={token}", Host="any.name:1")
        assert status == 200
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert ask(server, "/assets/board.js", Cookie=cookie.partition(";")[0])[0] == 200
        assert ask(server, "/assets/board.js", Cookie=cookie.partition("=")[0] + "=wrong")[0] == 403
        with Stream(server, Cookie=cookie.partition(";")[0]) as stream:
            assert stream.until("runs")["changed"][0]["name"] == "one"


def test_every_token_is_new(root: Path) -> None:
    with serving(root, "0.0.0.0") as one, serving(root, "0.0.0.0") as other:
        assert one.url.partition("token=")[2] != other.url.partition("token=")[2]


@pytest.mark.parametrize(("host", "alone"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.8.0.1", True)])
def test_loopback(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "localhost.example", "", "127.0.0.1.example"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    "path",
    ["/assets/../board.py", "/assets/%2e%2e/board.py", "/assets/..%2fboard.py", "/assets/board.html", "/../../etc/passwd"],
)
def test_no_path_leads_out_of_the_assets(served: BoardServer, path: str) -> None:
    assert ask(served, path)[0] == 404


@pytest.mark.parametrize(
    "id", ["../secret", "..%2Fsecret", "%2Fetc", "one/../../secret", "link", "linked", "one/checkpoints", "%00", "nothing"]
)
def test_only_what_is_listed_can_be_read(tmp_path: Path, root: Path, id: str) -> None:
    secret = make_run(tmp_path, "secret")
    (root / "link").symlink_to(secret)
    (root / "linked").mkdir()
    (root / "linked" / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    with serving(root) as server, Stream(server, f"run={id}") as stream:
        listed = {run["id"]: run for run in stream.until("runs")["changed"]}
        assert stream.until("source")["source"] is None
    assert listed.keys() == {"one", "linked"}
    assert listed["linked"]["status"] == "unreadable"
    assert "leads out" in listed["linked"]["note"]


@pytest.mark.parametrize("times", ["new", "as before"])
@pytest.mark.parametrize("what", ["one", "group", "one/metrics.jsonl", "one/environment.json"])
def test_nothing_is_read_through_a_link_made_after_listing(tmp_path: Path, root: Path, what: str, times: str) -> None:
    """A record, a folder of records or a file becomes a link that leads out; the folder's old time may be restored."""
    make_run(root / "group", "inner")
    secret = begin_run(tmp_path / "elsewhere", "inner", task="TOP-SECRET")
    secret.row({"kind": "note", "text": "TOP-SECRET"})
    (tmp_path / "elsewhere" / "one").symlink_to(secret.path)
    id = "group/inner" if what == "group" else "one"
    for path in [*root.rglob("*"), root]:
        os.utime(path, ns=(10**18, 10**18))  # old enough for the board to trust it
    with serving(root) as server, Stream(server, f"run={id}") as early:
        assert ask(server, f"/report?run={id}")[0] == 200
        assert early.until("source")["source"]["status"] == "done"
        (root / what).rename(tmp_path / "before")
        (root / what).symlink_to(tmp_path / "elsewhere" / what)
        if times == "as before":
            os.utime((root / what).parent, ns=(10**18, 10**18))
        status, _, page = ask(server, f"/report?run={id}")
        with Stream(server, f"run={id}") as late:
            source = late.until("source")["source"]
        secret.row({"kind": "note", "text": "TOP-SECRET"})
        assert early.until("source", lambda told: told["source"] is None)["source"] is None
        with Stream(server) as after:
            listed = {run["id"] for run in after.until("runs")["changed"] if run["status"] != "unreadable"}
        assert id not in listed
    assert "TOP-SECRET" not in page + early.said + late.said + after.said
    if what in ("one", "group"):
        assert (status, source) == (404, None)
    secret.finish({})


def test_never_writes(tmp_path: Path, root: Path) -> None:
    make_run(root / "study-x", "arm-0")
    (root / "broken").mkdir()
    (root / "broken" / "environment.json").write_text("{")
    live = begin_run(root, "live")
    add_steps(live, 1, 5)
    before = tree(root)
    with serving(root) as server, Stream(server, "run=one&run=live&run=broken&run=study-x/arm-0") as stream:
        stream.until("runs")
        for _ in range(4):
            stream.until("source")
    assert tree(root) == before
    end_run(live)


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    paths = [root, *root.rglob("*")]
    return {str(path): (about.st_mtime_ns, about.st_ctime_ns, about.st_size) for path in paths if (about := os.lstat(path))}


def test_a_running_record_is_sent_row_by_row_and_then_its_end(root: Path) -> None:
    live = begin_run(root, "live")
    add_steps(live, 1, 5)
    with serving(root) as server, Stream(server, "run=live") as stream:
        assert {run["name"]: run["status"] for run in stream.until("runs")["changed"]} == {"one": "done", "live": "running"}
        source = stream.until("source")["source"]
        assert source["series"]["step"]["step"] == [1, 2, 3, 4, 5]
        add_steps(live, 6, 10)
        told = stream.until("rows")
        seen = list(told["rows"]["step"]["step"])
        while seen[-1] < 10:  # rows may come in two events
            told = stream.until("rows")
            seen += told["rows"]["step"]["step"]
        assert seen == [6, 7, 8, 9, 10]
        while not told["rows"]["epoch"]:
            told = stream.until("rows")
        assert told["last"]["accuracy"] == pytest.approx(1 - 1 / 11)
        assert "step 10 of 40" in told["summary"]
        assert told["headline"] == told["summary"]
        end_run(live, 0.75)
        stream.until("runs", lambda told: [run["status"] for run in told["changed"]] == ["done"])
        assert stream.until("source", lambda told: told["source"]["status"] == "done")["source"]["last"]["accuracy"] == 0.75


def test_a_late_browser_gets_no_row_twice(root: Path) -> None:
    live = begin_run(root, "live")
    add_steps(live, 1, 5)
    with serving(root) as server, Stream(server, "run=live") as early:
        early.until("source")
        add_steps(live, 6, 9)
        with Stream(server, "run=live") as late:  # before or after the watcher sends these rows
            assert late.until("source")["source"]["series"]["step"]["step"][-1] == 9
            add_steps(live, 11, 11)
            seen: list[int] = []
            while 11 not in seen:
                seen += late.until("rows")["rows"]["step"].get("step", [])
            assert seen == [11]
    end_run(live)


def test_a_validation_sends_its_rows_and_not_the_whole_record(root: Path) -> None:
    """An epoch's end also changes course.csv, which says nothing that the epoch's row does not."""
    live = begin_run(root, "live")
    add_steps(live, 1, 9)
    with serving(root) as server, Stream(server, "run=live") as stream:
        stream.until("source")
        live.course_row({"time_s": 1.0, "val_accuracy": 0.5})
        add_steps(live, 10, 10)
        stream.until("rows", lambda told: bool(told["rows"]["epoch"]))
        add_steps(live, 11, 11)
        stream.until("rows", lambda told: told["rows"]["step"].get("step") == [11])
        assert stream.said.count("event: source") == 1
    end_run(live)


def test_a_phase_of_a_batch_schedule_sends_the_record_with_its_batch_and_its_steps(root: Path) -> None:
    live, phase = begin_run(root, "live"), {"kind": "phase", "virtual_workers": 2}
    live.row({**phase, "step": 0, "epoch": 0.0, "global_batch": 64, "total_steps": 80})
    add_steps(live, 1, 3)
    with serving(root) as server, Stream(server, "run=live") as stream:
        assert stream.until("source")["source"]["batch"] == ""
        live.row({**phase, "step": 3, "epoch": 0.1, "global_batch": 256, "total_steps": 41})
        add_steps(live, 4, 4)
        source = stream.until("source")["source"]
        assert (source["batch"], source["facts"]["total_steps"]) == ("64 to 256 in 2 phases", 41)
        assert [phase["step"] for phase in source["phases"]] == [0, 3]
    end_run(live)


def test_new_and_removed_runs_are_sent(root: Path) -> None:
    with serving(root) as server, Stream(server) as stream:
        assert [run["name"] for run in stream.until("runs")["changed"]] == ["one"]
        made = begin_run(root, "two")
        assert stream.until("runs", lambda told: bool(told["changed"]))["changed"][0]["id"] == "two"
        end_run(made)
        for path in made.path.iterdir():
            path.unlink()
        made.path.rmdir()
        stream.until("runs", lambda told: told["removed"] == ["two"])


def test_a_browser_that_reconnects_gets_what_changed_since(root: Path) -> None:
    with serving(root) as server:
        with Stream(server) as stream:
            since = stream.until("runs")["_id"]
        make_run(root, "two")
        with Stream(server, **{"Last-Event-ID": since}) as stream:
            told = stream.until("runs")
            assert (told["whole"], [run["name"] for run in told["changed"]]) == (False, ["two"])
        with Stream(server, f"since=other-{since.partition('-')[2]}") as stream:  # a version of another board process
            assert stream.until("runs")["whole"]


def test_a_record_that_cannot_be_read_hides_no_other(root: Path) -> None:
    (root / "pipe").mkdir()
    os.mkfifo(root / "pipe" / "metrics.jsonl")  # opening it would wait forever
    (root / "garbage").mkdir()
    (root / "garbage" / "environment.json").write_bytes(b"\xff\xfe\x00[")
    (root / "garbage" / "metrics.jsonl").write_text('{"kind": "step", "step": NaN, "loss": "x"}\n[1\n' + "[" * 100_000)
    with serving(root) as server, Stream(server, "run=garbage&run=pipe&run=one") as stream:
        listed = {run["id"]: run["status"] for run in stream.until("runs")["changed"]}
        found = [stream.until("source")["source"] for _ in range(3)]
    assert listed["one"] == "done"
    assert listed["pipe"] == "unreadable"
    assert "garbage" in listed
    assert [source and source["id"] for source in found] == ["garbage", None, "one"]


def test_ends_at_once_with_streams_open(root: Path) -> None:
    with serving(root) as server:
        stream = Stream(server)
        stream.until("runs")
    assert stream.is_over()  # and `serving` saw the server's thread end


def test_a_port_in_use_is_one_line(root: Path) -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(UsageError, match=r"port \d+ is in use.*--port 0"):
        board_verb(str(root), "127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("127.0.0.1", 70000, "--port is 70000"),
        ("no.such.host.invalid", 0, "not an address"),
        ("203.0.113.1", 0, "cannot listen"),
    ],
)
def test_an_impossible_address_is_one_line(root: Path, host: str, port: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        board_verb(str(root), host, port)


def test_no_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not exist; train first \(paceline train"):
        board_verb(str(tmp_path / "runs"), "127.0.0.1", 0)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        board_verb(str(tmp_path / "file"), "127.0.0.1", 0)


def test_without_the_extra_it_says_how_to_get_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(UsageError, match=r"needs uvicorn: pip install 'paceline\[board\]'"):
        board_verb(str(root), "127.0.0.1", 0)
