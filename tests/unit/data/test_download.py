"""`fetch` with a real local server that misbehaves in many ways."""

import errno
import gzip
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from paceline.data import download
from paceline.data.download import content_sha256, fetch
from paceline.errors import DataError

CONTENT = np.random.default_rng(0).bytes(300_000)


ARCHIVE = gzip.compress(CONTENT, mtime=0)


SHA256 = hashlib.sha256(CONTENT).hexdigest()


HALF = len(ARCHIVE) // 2


class Server(ThreadingHTTPServer):
    """Serves `body` on every path; the words of the path say how. Logs each request as (path, its Range header)."""

    daemon_threads = False  # so that closing the server joins its threads

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body = ARCHIVE
        self.requests: list[tuple[str, str | None]] = []
        self.asked = threading.Event()
        self.asked_again = threading.Event()
        self.go_on = threading.Event()

    def url(self, how: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{how}/file.gz"

    @property
    def ranges(self) -> list[str | None]:
        return [asked for _, asked in self.requests]

    def handle_error(self, request, client_address) -> None:
        """A client that hangs up is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        how = self.path.split("/")[1].split("+")
        asked = self.headers.get("Range")
        first = self.path not in [path for path, _ in self.server.requests]
        self.server.requests.append((self.path, asked))
        (self.server.asked if first else self.server.asked_again).set()
        if how[0].isdigit():
            return self.send_error(int(how[0]))
        if how[0] == "redirect":
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1/file.gz" if "ftp" in how else "file:///etc/hostname")
            return self.end_headers()
        if "hold" in how:
            self.server.go_on.wait(20)
        self.answer(how, self.server.body, asked, first)
        return None

    def answer(self, how: list[str], body: bytes, asked: str | None, first: bool) -> None:
        if "corrupt" in how:
            body = body[:-1000] + bytes(992) + body[-8:]
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and "norange" not in how else 0
        if start >= len(body):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            shift = 1 if "wrongrange" in how else 0
            self.send_header("Content-Range", f"bytes {start + shift}-{len(body) - 1}/{len(body)}")
        if "nolength" not in how:
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        broken = first or "always" in how
        if "cut" in how and broken:
            self.wfile.write(body[start : max(start, HALF)])
        elif "stall" in how and broken:
            self.wfile.write(body[start : max(start, HALF)])
            self.server.go_on.wait(20)
        else:
            self.wfile.write(body[start:])
        return None

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "_BACK_OFF_S", 0.001)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.go_on.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "new" / "file.gz"


def part(target: Path) -> Path:
    return target.with_name("file.gz.part")


def failure(*args: object, **kwargs: object) -> str:
    with pytest.raises(DataError) as caught:
        fetch(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_done(target: Path) -> None:
    assert target.read_bytes() == ARCHIVE
    assert not part(target).exists()


def test_a_planted_link_is_not_written_through(server: Server, target: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("theirs")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_name(f"{target.name}.part").symlink_to(tmp_path / "victim")
    fetch([server.url("fine")], target, SHA256)
    assert (tmp_path / "victim").read_text() == "theirs"
    assert target.read_bytes() == ARCHIVE
    assert not target.is_symlink()


def test_a_plain_download(server, target):
    seen = []
    assert fetch([server.url("ok")], target, SHA256, progress=lambda *now: seen.append(now)) == target
    assert_done(target)
    assert seen[-1] == (len(ARCHIVE), len(ARCHIVE))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_right_target_needs_no_network(server, target):
    target.parent.mkdir()
    target.write_bytes(gzip.compress(CONTENT, mtime=12345))  # another archive of the same content
    fetch([server.url("ok")], target, SHA256)
    assert server.requests == []


def test_a_damaged_target_is_replaced(server, target):
    target.parent.mkdir()
    target.write_bytes(ARCHIVE[:-1])
    fetch([server.url("ok")], target, SHA256)
    assert_done(target)


def test_a_file_that_is_not_gz_is_hashed_as_it_is(server, tmp_path):
    fetch([server.url("ok")], tmp_path / "file.bin", hashlib.sha256(ARCHIVE).hexdigest())
    assert (tmp_path / "file.bin").read_bytes() == ARCHIVE


def test_a_gz_decompressed_in_transit_is_the_same_content(server, target):
    server.body = CONTENT
    fetch([server.url("ok")], target, SHA256)
    assert target.read_bytes() == CONTENT


def test_a_cut_transfer_is_continued(server, target):
    fetch([server.url("cut")], target, SHA256)
    assert_done(target)
    assert server.ranges == [None, f"bytes={HALF}-"]


def test_a_cut_transfer_is_continued_by_the_next_url(server, target):
    fetch([server.url("cut+always"), server.url("ok")], target, SHA256)
    assert_done(target)
    assert server.ranges == [None, f"bytes={HALF}-"]


def test_a_cut_transfer_of_unknown_length_is_noticed(server, target):
    fetch([server.url("cut+nolength")], target, SHA256)
    assert_done(target)
    assert len(server.requests) == 2


def test_a_server_that_ignores_range_is_read_from_the_start(server, target):
    fetch([server.url("cut+norange")], target, SHA256)
    assert_done(target)
    assert server.ranges == [None, f"bytes={HALF}-"]


def test_a_server_that_sends_another_range_is_read_from_the_start(server, target):
    fetch([server.url("cut+wrongrange")], target, SHA256)
    assert_done(target)
    assert server.ranges == [None, f"bytes={HALF}-", None]


def test_a_stall_ends_at_the_time_out_and_is_continued(server, target):
    fetch([server.url("stall")], target, SHA256, timeout_s=0.2)
    assert_done(target)
    assert server.ranges == [None, f"bytes={HALF}-"]


def test_a_stall_that_does_not_end_is_an_error(server, target):
    text = failure([server.url("stall+always")], target, SHA256, timeout_s=0.1, attempts=2)
    assert "no data for 0.1 s" in text
    assert not target.exists()


@pytest.mark.parametrize("length", ["length", "nolength"])
def test_a_transfer_that_is_always_cut_is_an_error(server, target, length):
    failure([server.url(f"cut+always+{length}")], target, SHA256, attempts=3)
    assert len(server.requests) == 3
    assert not target.exists()


def test_a_complete_part_is_only_renamed(server, target):
    target.parent.mkdir()
    part(target).write_bytes(ARCHIVE)
    fetch([server.url("ok")], target, SHA256)
    assert_done(target)
    assert server.ranges == [f"bytes={len(ARCHIVE)}-"]


@pytest.mark.parametrize("junk", [b"junk" * 100, bytes(len(ARCHIVE)), bytes(2 * len(ARCHIVE))])
def test_a_part_of_something_else_is_thrown_away(server, target, junk):
    target.parent.mkdir()
    part(target).write_bytes(junk)
    fetch([server.url("ok")], target, SHA256, attempts=1)
    assert_done(target)
    assert server.ranges == [f"bytes={len(junk)}-", None]


def test_corrupt_content_is_never_kept(server, target):
    text = failure([server.url("corrupt")], target, SHA256, attempts=2)
    assert not target.exists()
    assert not part(target).exists()
    assert server.ranges == [None, None]
    assert server.url("corrupt") in text


def test_content_of_another_hash_is_never_kept(server, target):
    assert "SHA-256" in failure([server.url("ok")], target, "0" * 64, attempts=1)
    assert not target.exists()
    assert not part(target).exists()


def test_corrupt_content_is_followed_by_the_next_url(server, target):
    fetch([server.url("corrupt"), server.url("ok")], target, SHA256)
    assert_done(target)


def test_every_url_is_tried_and_its_error_shown(server, target):
    closed = "http://127.0.0.1:1/file.gz"
    text = failure([server.url("404"), server.url("500"), closed], target, SHA256, attempts=1)
    assert f"{server.url('404')}: HTTP 404" in text
    assert f"{server.url('500')}: HTTP 500" in text
    assert f"{closed}: " in text
    assert "refused" in text


def test_a_404_is_asked_once_and_a_500_again(server, target):
    failure([server.url("404"), server.url("500")], target, SHA256, attempts=4)
    paths = [path for path, _ in server.requests]
    assert paths == ["/404/file.gz"] + ["/500/file.gz"] * 3


def test_the_back_off_doubles_each_round(server, target, monkeypatch):
    pauses = []
    monkeypatch.setattr(download, "_BACK_OFF_S", 0.5)
    monkeypatch.setattr(download.time, "sleep", pauses.append)
    failure([server.url("500"), server.url("503")], target, SHA256, attempts=6)
    assert pauses == [0.5, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/file.gz", "data:,x", "/etc/hostname"])
def test_only_http_and_https(target, url):
    assert "must be an http or https address" in failure([url], target, SHA256)
    assert not target.parent.exists()


@pytest.mark.parametrize("where", ["ftp", "file"])
def test_no_redirect_leads_away_from_http(server, target, where):
    failure([server.url(f"redirect+{where}")], target, SHA256, attempts=1)
    assert not target.exists()


def test_an_interrupt_leaves_the_part_for_the_next_call(server, target):
    def interrupt(done: int, total: int | None) -> None:
        if done >= HALF:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch([server.url("ok")], target, SHA256, progress=interrupt)
    there = part(target).stat().st_size
    assert there >= HALF
    assert not target.exists()
    fetch([server.url("ok")], target, SHA256)
    assert_done(target)
    assert server.ranges == [None, f"bytes={there}-"]


class FullDisk:
    """A file that accepts some bytes and then no more."""

    def __init__(self, file) -> None:
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, chunk: bytes) -> int:
        self.file.write(chunk[:10])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_removes_the_part_and_says_so(server, target, monkeypatch):
    monkeypatch.setattr(download, "open", lambda path, mode, opener: FullDisk(Path.open(path, mode)), raising=False)
    text = failure([server.url("ok")], target, SHA256)
    assert text.startswith(f"no space left for {target}")
    assert len(server.requests) == 1
    assert not part(target).exists()
    assert not target.exists()


def test_a_folder_that_cannot_be_made_is_one_line(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "cannot write" in failure([server.url("ok")], tmp_path / "file" / "file.gz", SHA256)


def test_the_bytes_are_on_disk_before_the_name(server, target, monkeypatch):
    order = []
    true_fsync, true_replace = download.os.fsync, download.os.replace
    monkeypatch.setattr(download.os, "fsync", lambda fd: order.append("fsync") or true_fsync(fd))
    monkeypatch.setattr(download.os, "replace", lambda *paths: order.append("replace") or true_replace(*paths))
    fetch([server.url("ok")], target, SHA256)
    assert order == ["fsync", "replace"]


def test_a_process_that_waited_for_the_lock_finds_the_file(server, target):
    target.parent.mkdir()
    waiting = threading.Thread(target=fetch, args=([server.url("ok")], target, SHA256))
    with download.lock(target.with_name(f"{target.name}.lock")):
        waiting.start()
        target.write_bytes(ARCHIVE)
    waiting.join(20)
    assert not waiting.is_alive()
    assert server.requests == []


def test_content_sha256(tmp_path):
    for mtime in (0, 1):
        (tmp_path / "a.gz").write_bytes(gzip.compress(CONTENT, mtime=mtime))
        assert content_sha256(tmp_path / "a.gz") == SHA256
    (tmp_path / "a").write_bytes(CONTENT)
    assert content_sha256(tmp_path / "a") == SHA256
    (tmp_path / "cut.gz").write_bytes(ARCHIVE[:-1])
    with pytest.raises(DataError, match=r"not a complete gzip file"):
        content_sha256(tmp_path / "cut.gz")
    with pytest.raises(DataError, match="cannot be read"):
        content_sha256(tmp_path / "nowhere")
