"""Updates for the board's browsers while runs train: server-sent events from one watcher that all browsers share.

The watcher looks at the folder twice per second while a browser is connected, and puts what changed into each browser's queue.
A stream begins with the list of records (or what changed since the version that the browser has) and each record the browser
follows, complete. Changes of the list and appended rows follow. All in one stream, in order: nothing is missed in between.

    event: runs     {"whole", "version", "pending", "changed": [summaries], "removed": [ids]}
    event: source   {"id", "headline", "source": the result of `read_source`; null if the record is gone}
    event: rows     {"id", "headline", "summary", "last", "notes", "rows": {"step": {"step": [...], "loss": [...]}, ...}}
"""

import asyncio
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.board.listing import Listing, Tail
from paceline.files import finite
from paceline.report.confined import ConfinedPath
from paceline.report.read import read_source
from paceline.report.series import MOST_ROWS, Columns, number, text, thin
from paceline.report.summary import headline, summarize

T = TypeVar("T")

MOST_FOLLOWED = 24
"""Records that one browser may follow: more lines cannot be told apart in a chart."""


class Live:
    """The watcher, and the browsers it sends updates to."""

    def __init__(self, listing: Listing, pause_s: float = 0.5) -> None:
        self._listing = listing
        self._pause_s = pause_s
        self._boot = secrets.token_hex(4)  # versions from another board process do not apply here
        self._browsers: set[_Browser] = set()
        self._tails: dict[str, Tail] = {}
        self._marks: dict[str, tuple[Any, ...]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._stopped = False

    async def events(self, ids: Iterable[str], since: str = "") -> AsyncIterator[str]:
        """One browser's stream. `since` is the id of the last event it received."""
        browser, alone = _Browser(list(dict.fromkeys(ids))[:MOST_FOLLOWED]), not self._browsers
        self._browsers.add(browser)
        try:
            boot, _, version = since.partition("-")
            known = int(version) if boot == self._boot and version.isdecimal() else 0
            yield self._runs(await self._look(known, everything=alone), whole=not known)
            self._watcher = self._watcher or asyncio.create_task(self._watch(self._listing.version))
            for id in browser.ids:
                yield await self._source(browser, id)
            while not self._stopped:
                update = await browser.next()
                if update is None:
                    return
                if isinstance(update, _Rows):
                    yield await self._rows(browser, update)
                elif isinstance(update, dict):
                    yield self._runs(update) if update else _KEEP_ALIVE
                else:
                    yield await self._source(browser, update)
        finally:
            self._browsers.discard(browser)
            if not self._browsers and self._watcher:
                self._watcher.cancel()
                self._watcher = None

    async def find(self, ids: Sequence[str]) -> list[ConfinedPath]:
        """The folders of these records; those that are not listed are left out."""
        paths = [await aside(self._listing.path, id) for id in ids]
        if None in paths:  # the folder may not have been scanned yet
            await self._look(0, everything=True)
            paths = [await aside(self._listing.path, id) for id in ids]
        return [path for path in paths if path is not None]

    def stop(self) -> None:
        """End all streams: the server waits for them before it stops. Any thread may call it."""
        self._stopped = True
        for browser in list(self._browsers):
            browser.end()

    async def _watch(self, version: int) -> None:
        try:
            await self._watch_on(version)
        except Exception:  # a bug: the browsers reconnect to a new watcher, and Python prints the error
            self._watcher = None
            for browser in self._browsers:
                browser.end()
            raise

    async def _watch_on(self, version: int) -> None:
        while not self._stopped:
            if not self._listing.pending:
                await asyncio.sleep(self._pause_s)
            change = await self._look(version, everything=False)
            if change["version"] != version or change["pending"]:
                version = change["version"]
                for browser in self._browsers:
                    browser.put(change)
            for update in await self._appended():
                for browser in self._browsers:
                    if (update.id if isinstance(update, _Rows) else update) in browser.ids:
                        browser.put(update)

    async def _look(self, since: int, *, everything: bool) -> dict[str, Any]:
        await aside(self._listing.look, everything=everything)
        return await aside(self._listing.changes, since)

    async def _appended(self) -> list["_Rows | str"]:
        """New rows of the followed records; only the id where the whole record must be read again."""
        # Skip records that a browser has not received yet: it would get their rows twice.
        followed = {id for browser in self._browsers for id in browser.ids if id in browser.followed}
        for gone in self._tails.keys() - followed:
            self._tails.pop(gone)
        found: list[_Rows | str] = []
        for id in followed:
            known, marks, tail = self._listing.knows(id), self._listing.marks(id), self._tails.get(id)
            if not known or tail is None:
                if known or tail is not None:  # it appeared, or it is gone
                    found.append(id)
                self._tails.pop(id, None)
                if known:
                    await self._follow(id)
                continue
            rows = await aside(tail.read)
            if rows is None or marks != self._marks.get(id):
                self._marks[id] = marks
                found.append(id)
            elif rows:
                found.append(_Rows(id, rows))
        return found

    async def _follow(self, id: str) -> int:
        """Start a tail on a record. Returns the current end of its rows."""
        path = await aside(self._listing.path, id)
        if path is None:  # its tail stays until the watcher has told every browser
            return 0
        tail = await aside(Tail, path)
        if id not in self._tails:
            self._tails[id], self._marks[id] = tail, self._listing.marks(id)
        return tail.end

    def _runs(self, change: Mapping[str, Any], *, whole: bool = False) -> str:
        return _event("runs", {"whole": whole, **change}, f"{self._boot}-{change['version']}")

    async def _source(self, browser: "_Browser", id: str) -> str:
        """A complete record. It has the rows up to their current end, and later updates have those after it."""
        followed = browser.followed[id] = _Followed(end=await self._follow(id))
        path, source = await aside(self._listing.path, id), None
        if path is not None:
            begin = time.monotonic()
            source = await aside(_read_source, path, browser.name_of(id), followed.end) | {"id": id}
            followed.read_s = time.monotonic() - begin
            large = ("series", "layers", "timeline", "landscapes", "toys")
            followed.head = {name: value for name, value in source.items() if name not in large}
        return _event("source", {"id": id, "headline": browser.headline(), "source": source})

    async def _rows(self, browser: "_Browser", update: "_Rows") -> str:
        followed = browser.followed.setdefault(update.id, _Followed())
        rows = [row for end, row in update.rows if end > followed.end]
        followed.end = max(followed.end, update.rows[-1][0])
        followed.sent += len(rows)
        knows_epochs = number(followed.head.get("facts", {}).get("steps_per_epoch"))  # else they are worked out from all rows
        begins = any(row.get("kind") in ("phase", "join") for row in rows)  # they change the run's batch, steps and workers
        if followed.is_due() or begins or not knows_epochs:
            return await self._source(browser, update.id)
        followed.apply(rows)
        tables = {kind: Columns() for kind in ("step", "epoch", "health")}
        for row in rows:
            if row.get("kind") in tables:
                tables[row["kind"]].add(row)
        about = {name: followed.head[name] for name in ("summary", "last")}
        notes = [text(row.get("text")) for row in rows if row.get("kind") == "note"]
        series = {kind: thin(columns) for kind, columns in tables.items()}
        return _event("rows", {"id": update.id, "headline": browser.headline(), **about, "rows": series, "notes": notes})


async def aside(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call a function in its own thread. Ctrl-C does not wait for it: it only reads, however long that takes."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: None if answer.done() else set_it(value))

    def call() -> None:
        try:
            settle(answer.set_result, function(*args, **options))
        except BaseException as error:
            settle(answer.set_exception, error)

    threading.Thread(target=call, daemon=True).start()
    return await answer


_MOST_WAITING = 1_000  # updates; a browser that reads none of them is asleep, and reconnects when it wakes
_KEEP_ALIVE = ": still here\n\n"
_KEEP_ALIVE_S = 15.0
_WHOLE_AGAIN_S = 30.0  # how often what depends on all rows, such as the mean components of a step, is updated ...
_CHEAP_S = 0.2  # ... if reading the record takes no longer than this


@dataclass(frozen=True)
class _Rows:
    """Rows appended to a record, each with its end in the file."""

    id: str
    rows: list[tuple[int, dict[str, Any]]]


Update = dict[str, Any] | _Rows | str
"""A change of the list, appended rows, or the id of a record to send again."""


@dataclass
class _Followed:
    """What a browser has received of a record."""

    end: int = 0
    """The byte of metrics.jsonl up to which it has the rows."""
    sent: int = 0
    """Rows sent since the complete record."""
    head: dict[str, Any] = field(default_factory=dict)
    """The record without its series."""
    read_s: float = 0.0
    _whole_at: float = field(default_factory=time.monotonic)

    def is_due(self) -> bool:
        """Whether to send the complete record again: a page left open overnight would otherwise hold every row."""
        return self.sent > MOST_ROWS or (self.read_s < _CHEAP_S and time.monotonic() - self._whole_at > _WHOLE_AGAIN_S)

    def apply(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Update the run's last values and its summary."""
        last = dict(self.head.get("last", {}))
        for row in rows:
            last |= {
                ours: row[name]
                for name, ours in _LAST.get(row.get("kind", ""), {}).items()
                if number(row.get(name)) is not None
            }
        self.head["last"] = last
        self.head["summary"] = summarize(self.head)


_LAST = {
    "step": {"step": "steps", "time_s": "time_s", "loss": "train_loss", "noise_scale": "noise_scale"},
    "epoch": {
        **{"step": "steps", "time_s": "time_s", "epoch": "epochs"},
        **{"val_accuracy": "accuracy", "val_loss": "loss", "samples_per_s": "samples_per_s"},
    },
    "health": {"memory_bytes": "memory_bytes"},
}
"""The fields of each kind of row that a source has in `last`, and their names there."""


@dataclass(eq=False)
class _Browser:
    ids: list[str]
    followed: dict[str, _Followed] = field(default_factory=dict)
    _queue: "asyncio.Queue[Update | None]" = field(default_factory=asyncio.Queue)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def put(self, update: Update) -> None:
        if self._queue.qsize() < _MOST_WAITING:
            self._queue.put_nowait(update)
        elif self._queue.qsize() == _MOST_WAITING:
            self._queue.put_nowait(None)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, None)

    async def next(self) -> Update | None:
        """The next update; an empty dict after a long silence, so that a lost connection is noticed."""
        try:
            return await asyncio.wait_for(self._queue.get(), _KEEP_ALIVE_S)
        except TimeoutError:
            return {}

    def name_of(self, id: str) -> str:
        """A record's name on the page: without its folder if all records are in that one."""
        folders = {each.rpartition("/")[0] for each in self.ids}
        return id.rpartition("/")[2] if len(folders) == 1 and len(self.ids) > 1 else id

    def headline(self) -> str:
        heads = [self.followed[id].head for id in self.ids if id in self.followed and self.followed[id].head]
        try:
            return headline(heads) if heads else ""
        except Exception:  # values of unexpected types
            return f"{len(heads)} records."


def _event(name: str, data: Any, id: str = "") -> str:
    return f"event: {name}\n{f'id: {id}{chr(10)}' if id else ''}data: {_to_json(data)}\n\n"


def _read_source(path: ConfinedPath, name: str, end: int) -> dict[str, Any]:
    """A record up to byte `end` of its rows, under its name on the board."""
    source = read_source(path, end) | {"name": path.name if name == "." else name}
    return {**source, "summary": summarize(source)}


def _to_json(value: Any) -> str:
    """JSON for a browser: NaN in a foreign record becomes null, and other types become text."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError):
        return json.dumps(finite(value), allow_nan=False, separators=(",", ":"), default=str)
