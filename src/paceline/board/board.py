"""`paceline board`: the records of a folder in a browser, listed, compared, and drawn while they train. It never writes.

Access control: only this machine can connect, unless a host is given; then every request needs the token that is printed with
the address. On this machine the Host header must name it, too, or a foreign page could reach the board under its own name (DNS
rebinding). Only GET and HEAD are answered, and the page may load nothing from other servers. starlette and uvicorn are imported
only here, and only when a board is started. `listing.py` finds what changed, `live.py` sends it.
"""

import errno
import hashlib
import hmac
import html
import ipaddress
import secrets
import shlex
import signal
import socket
import threading
import webbrowser
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from paceline.board.listing import Listing
from paceline.board.live import MOST_FOLLOWED, Live, aside
from paceline.errors import UsageError
from paceline.report.library import plotly
from paceline.report.page import SCRIPTS, asset, render
from paceline.report.read import read_source

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request

DEFAULT_PORT = 8420
DEFAULT_FOLDER = "runs"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def board_verb(folder: str, host: str = "127.0.0.1", port: int = DEFAULT_PORT, open_browser: bool = False) -> int:
    """Serve the board until Ctrl-C, which ends it with exit code 0."""
    _check_installed()
    root = Path(folder)
    if not root.is_dir():
        found = "is a file, not a folder" if root.exists() else "does not exist"
        raise UsageError(
            f"board of {folder}: it {found}; train first (paceline train fashion-mnist-mini) or name a folder with records"
        )
    with listen(host, port) as listener:
        server = make_server(root, listener, host)
        print(f"board at {server.url} (Ctrl-C to stop)", flush=True)
        if open_browser:
            threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
        with suppress(KeyboardInterrupt):
            server.run()
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at this address; a UsageError where that is impossible. Port 0 means any free port."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port is {port}: it must be from 0 (any free port) to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"--host {host!r} is not an address of this machine: {getattr(error, 'strerror', None) or error}"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} is in use, perhaps by another board: choose another, or --port 0 for any free port"
            ) from None
        if error.errno == errno.EACCES:
            raise UsageError(f"port {port} needs root: choose one above 1023, or --port 0 for any free port") from None
        raise UsageError(f"cannot listen at --host {host} --port {port}: {error.strerror}") from None
    return listener


@dataclass(frozen=True)
class BoardServer:
    """A board that is ready to run, and its address."""

    server: "uvicorn.Server"
    listener: socket.socket
    url: str

    def run(self) -> None:
        """Serve until Ctrl-C, or until `stop` is called in another thread."""
        self.server.run(sockets=[self.listener])

    def stop(self) -> None:
        """Ask `run` to end."""
        self.server.handle_exit(signal.SIGTERM, None)


def make_server(root: Path, listener: socket.socket, host: str, pause_s: float = 0.5) -> BoardServer:
    """The server for a socket. It looks at the folder every `pause_s`. A host that others can reach gets a token."""
    import uvicorn

    port = listener.getsockname()[1]
    token = "" if is_loopback(host) else secrets.token_urlsafe(24)
    live = Live(Listing(root), pause_s)
    guard = Guard(make_app(root, live), port=port, host=host, token=token)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            live.stop()  # the server would wait for streams that never end
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        guard,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=2,
        ws="none",
    )
    name = f"[{host}]" if ":" in host else host
    if token and host in ("0.0.0.0", "::", ""):  # every address of this machine: others reach it by its name
        name = socket.gethostname()
    return BoardServer(Server(config), listener, f"http://{name}:{port}/" + (f"?token={token}" if token else ""))


def make_app(root: Path, live: Live) -> App:
    """The application behind `Guard`."""
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    assets = {name: asset(name) for name in ("page.css", *SCRIPTS)} | {name: own_asset(name) for name in _OWN}
    script = plotly()
    script_name = f"plotly-{hashlib.sha256(script.encode()).hexdigest()[:12]}.js"
    scripts = "\n".join(f'<script src="assets/{name}" defer></script>' for name in SCRIPTS)
    page = own_asset("board.html").replace("@scripts@", scripts).replace("@plotly@", script_name)
    elsewhere = "" if str(root) == DEFAULT_FOLDER else f" --runs-dir {shlex.quote(str(root))}"
    page = page.replace("@folder@", html.escape(str(root))).replace("@runs-dir@", html.escape(elsewhere))

    async def home(request: "Request") -> Response:
        return Response(page, media_type="text/html; charset=utf-8")

    async def file(request: "Request") -> Response:
        name = request.path_params["name"]
        if name == script_name:  # the name holds a hash of the content, so browsers may cache it forever
            return Response(
                script, media_type="text/javascript", headers={"Cache-Control": "private, max-age=31536000, immutable"}
            )
        if name not in assets:
            return PlainTextResponse("no such file\n", status_code=404)
        return Response(assets[name], media_type="text/css" if name.endswith(".css") else "text/javascript")

    async def events(request: "Request") -> Response:
        since = request.headers.get("last-event-id") or request.query_params.get("since", "")
        stream = live.events(request.query_params.getlist("run"), since)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def report(request: "Request") -> Response:
        paths = await live.find(request.query_params.getlist("run")[:MOST_FOLLOWED])
        if not paths:
            return PlainTextResponse("no such record\n", status_code=404)
        text = await aside(lambda: render([read_source(path) for path in paths]))
        name = 'attachment; filename="paceline-report.html"'  # saved to disk, where the policy in the file applies
        return Response(text, media_type="text/html; charset=utf-8", headers={"Content-Disposition": name})

    routes = [Route("/", home), Route("/report", report), Route("/events", events), Route("/assets/{name}", file)]
    return Starlette(routes=routes)


def own_asset(name: str) -> str:
    """A file that only the board's page has; the others are the report's."""
    return (files("paceline.board") / "assets" / name).read_text(encoding="utf-8")


class Guard:
    """Access control, and the headers that tell browsers what our pages may do."""

    def __init__(self, app: App, *, port: int, host: str, token: str = "") -> None:
        self._app, self._token = app, token
        self._hosts = {f"{name}:{port}" for name in ("localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host)}
        self._hosts |= {name.removesuffix(":80") for name in self._hosts}
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        new = self._is_ours(parse_qs(scope["query_string"].decode("latin-1")).get("token", []))
        refusal = self._refuse(scope["method"], headers, new)

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                message["headers"] += [header for header in _HEADERS if header[0] not in own]
                if new and not refusal:
                    cookie = f"{self._cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/"
                    message["headers"].append((b"set-cookie", cookie.encode()))
            await send(message)

        if refusal:
            await guarded(
                {
                    "type": "http.response.start",
                    "status": refusal[0],
                    "headers": [(b"content-type", b"text/plain; charset=utf-8")],
                }
            )
            await guarded({"type": "http.response.body", "body": refusal[1].encode()})
        else:
            await self._app(scope, receive, guarded)

    @property
    def _cookie(self) -> str:
        return f"paceline-board-{self._port}"  # browsers share cookies between ports, so the name holds the port

    def _refuse(self, method: str, headers: dict[bytes, bytes], has_token: bool) -> tuple[int, str] | None:
        """The HTTP status and reason of a refused request; None if it is allowed."""
        if method not in ("GET", "HEAD"):
            return 405, "the board is read-only: GET and HEAD\n"
        if not self._token:
            if headers.get(b"host", b"").decode("latin-1").lower() in self._hosts:
                return None
            return 403, f"this board answers only at localhost:{self._port}; through a tunnel, use the same port at both ends\n"
        cookies = [each.strip().partition("=") for each in headers.get(b"cookie", b"").decode("latin-1").split(";")]
        if has_token or self._is_ours([value for name, _, value in cookies if name == self._cookie]):
            return None
        return 403, "this board needs the token that was printed with its address: open that address once\n"

    def _is_ours(self, tokens: Sequence[str]) -> bool:
        return bool(self._token) and any(hmac.compare_digest(token.encode(), self._token.encode()) for token in tokens)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name, which may be any machine
        return False


_OWN = ("board.css", "columns.js", "address.js", "lines.js", "rows.js", "board.js")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


def _check_installed() -> None:
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"the board needs {' and '.join(missing)}: pip install 'paceline[board]'")
