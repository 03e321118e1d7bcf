"""What a board's browsers are told while runs train: server-sent events from one watcher that all of them share.

The watcher looks at the folder twice a second while anybody is connected, and puts what changed into each browser's queue. A
stream begins with the list of records (or what changed since the version the browser already has) and the records it follows,
whole; then come changes of the list and appended rows. All of it comes in one stream, in order: nothing is missed in between.

    event: runs     {"whole", "version", "pending", "changed": [summaries], "removed": [ids]}
    event: source   {"id", "headline", "source": what `read.read_source` says; null where the record is gone}
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
from paceline.report.summary import headline, sentence

T = TypeVar("T")

MOST_FOLLOWED = 24
"""Records that one browser may follow: more lines than that nobody tells apart."""


class Live:
    """The watcher and those it tells."""

    def __init__(self, listing: Listing, pause_s: float = 0.5) -> None:
        self._listing = listing
        self._pause_s = pause_s
        self._boot = secrets.token_hex(4)  # versions of another board's listing mean nothing here
        self._browsers: set[_Browser] = set()
        self._tails: dict[str, Tail] = {}
        self._marks: dict[str, tuple[Any, ...]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._stopped = False

    async def events(self, ids: Iterable[str], since: str = "") -> AsyncIterator[str]:
        """One browser's stream; `since` is the id of the last event it had."""
        browser, alone = _Browser(list(dict.fromkeys(ids))[:MOST_FOLLOWED]), not self._browsers
        self._browsers.add(browser)
        try:
            boot, _, version = since.partition("-")
            known = int(version) if boot == self._boot and version.isdecimal() else 0
            yield self._runs(await self._look(known, everything=alone), whole=not known)  # nobody has watched until now
            self._watcher = self._watcher or asyncio.create_task(self._watch(self._listing.version))
            for id in browser.ids:
                yield await self._source(browser, id)
            while not self._stopped:
                told = await browser.next()
                if told is None:
                    return
                if isinstance(told, _Rows):
                    yield await self._rows(browser, told)
                elif isinstance(told, dict):
                    yield self._runs(told) if told else _SIGN_OF_LIFE
                else:
                    yield await self._source(browser, told)
        finally:
            self._browsers.discard(browser)
            if not self._browsers and self._watcher:
                self._watcher.cancel()
                self._watcher = None

    async def find(self, ids: Sequence[str]) -> list[ConfinedPath]:
        """The folders of those of these records that are listed."""
        paths = [await aside(self._listing.path, id) for id in ids]
        if None in paths:  # the folder may not have been scanned yet
            await self._look(0, everything=True)
            paths = [await aside(self._listing.path, id) for id in ids]
        return [path for path in paths if path is not None]

    def stop(self) -> None:
        """End all streams, so that a server that waits for them can end. Any thread may call it."""
        self._stopped = True
        for browser in list(self._browsers):
            browser.end()

    async def _watch(self, version: int) -> None:
        try:
            await self._watch_on(version)
        except Exception:  # ours: let the browsers come back to a new watcher, and Python say what it was
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
                    browser.tell(change)
            for told in await self._appended():
                for browser in self._browsers:
                    if (told.id if isinstance(told, _Rows) else told) in browser.ids:
                        browser.tell(told)

    async def _look(self, since: int, *, everything: bool) -> dict[str, Any]:
        await aside(self._listing.look, everything=everything)
        return await aside(self._listing.changes, since)

    async def _appended(self) -> list["_Rows | str"]:
        """New rows of the records somebody follows, or the id alone where the record must be read anew."""
        # Skip records that a browser is about to get for the first time: it would get them twice.
        followed = {id for browser in self._browsers for id in browser.ids if id in browser.followed}
        for gone in self._tails.keys() - followed:
            self._tails.pop(gone)
        found: list[_Rows | str] = []
        for id in followed:
            known, marks, tail = self._listing.knows(id), self._listing.marks(id), self._tails.get(id)
            if not known or tail is None:
                if known or tail is not None:  # it came, or it went
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
        """Have a tail on a record; returns where its rows end now."""
        path = await aside(self._listing.path, id)
        if path is None:  # its tail stays until the watcher has told every follower
            return 0
        tail = await aside(Tail, path)
        if id not in self._tails:
            self._tails[id], self._marks[id] = tail, self._listing.marks(id)
        return tail.end

    def _runs(self, change: Mapping[str, Any], *, whole: bool = False) -> str:
        return _event("runs", {"whole": whole, **change}, f"{self._boot}-{change['version']}")

    async def _source(self, browser: "_Browser", id: str) -> str:
        """A record as a whole. Rows up to where it ends now are in it, and are not told again."""
        followed = browser.followed[id] = _Followed(end=await self._follow(id))
        path, source = await aside(self._listing.path, id), None
        if path is not None:
            begin = time.monotonic()
            source = await aside(_read_source, path, id)
            followed.read_s = time.monotonic() - begin
            followed.head = {name: value for name, value in source.items() if name not in ("series", "timeline", "landscape")}
        return _event("source", {"id": id, "headline": browser.headline(), "source": source})

    async def _rows(self, browser: "_Browser", told: "_Rows") -> str:
        followed = browser.followed.setdefault(told.id, _Followed())
        rows = [row for end, row in told.rows if end > followed.end]
        followed.end = max(followed.end, told.rows[-1][0])
        followed.told += len(rows)
        knows_epochs = number(followed.head.get("facts", {}).get("steps_per_epoch"))  # or they are worked out from all rows
        if followed.is_due() or not knows_epochs:
            return await self._source(browser, told.id)
        followed.bring_up_to_date(rows)
        tables = {kind: Columns() for kind in ("step", "epoch", "health")}
        for row in rows:
            if row.get("kind") in tables:
                tables[row["kind"]].add(row)
        about = {name: followed.head[name] for name in ("summary", "last")}
        notes = [text(row.get("text")) for row in rows if row.get("kind") == "note"]
        series = {kind: thin(columns) for kind, columns in tables.items()}
        return _event("rows", {"id": told.id, "headline": browser.headline(), **about, "rows": series, "notes": notes})


async def aside(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call it in a thread of its own, which Ctrl-C does not wait for: it only reads, however long that takes."""
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


_MOST_WAITING = 1_000  # events; a browser that reads none of them is asleep, and asks again when it wakes
_SIGN_OF_LIFE = ": still here\n\n"
_SIGN_OF_LIFE_S = 15.0
_WHOLE_AGAIN_S = 30.0  # what is made of all rows, such as where the time went, is brought up to date so often ...
_CHEAP_S = 0.2  # ... if reading the record takes no longer than this


@dataclass(frozen=True)
class _Rows:
    """Rows appended to a record, each with where it ends in its file."""

    id: str
    rows: list[tuple[int, dict[str, Any]]]


Told = dict[str, Any] | _Rows | str


@dataclass
class _Followed:
    """What a browser knows of a record."""

    end: int = 0
    """Up to which byte of its metrics."""
    told: int = 0
    """How many rows since it had the whole."""
    head: dict[str, Any] = field(default_factory=dict)
    """The record without its series."""
    read_s: float = 0.0
    _whole_at: float = field(default_factory=time.monotonic)

    def is_due(self) -> bool:
        """Whether it is time for the whole again: or a page left open over night would hold every row."""
        return self.told > MOST_ROWS or (self.read_s < _CHEAP_S and time.monotonic() - self._whole_at > _WHOLE_AGAIN_S)

    def bring_up_to_date(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Where the run stands, and the sentence about it."""
        last = dict(self.head.get("last", {}))
        for row in rows:
            last |= {
                ours: row[name]
                for name, ours in _LAST.get(row.get("kind", ""), {}).items()
                if number(row.get(name)) is not None
            }
        self.head["last"] = last
        self.head["summary"] = _sentence(self.head)


_LAST = {
    "step": {"step": "steps", "time_s": "time_s", "loss": "train_loss", "noise_scale": "noise_scale"},
    "epoch": {
        **{"step": "steps", "time_s": "time_s", "epoch": "epochs"},
        **{"val_accuracy": "accuracy", "val_loss": "loss", "samples_per_s": "samples_per_s"},
    },
    "health": {"memory_bytes": "memory_bytes"},
}
"""Which of a row's fields say where a run stands, and their names in `last`."""


@dataclass(eq=False)
class _Browser:
    ids: list[str]
    followed: dict[str, _Followed] = field(default_factory=dict)
    _queue: "asyncio.Queue[Told | None]" = field(default_factory=asyncio.Queue)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def tell(self, told: Told) -> None:
        if self._queue.qsize() < _MOST_WAITING:
            self._queue.put_nowait(told)
        elif self._queue.qsize() == _MOST_WAITING:
            self._queue.put_nowait(None)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, None)

    async def next(self) -> Told | None:
        """What to tell next; an empty dict after a while of silence, so that a connection that is gone is noticed."""
        try:
            return await asyncio.wait_for(self._queue.get(), _SIGN_OF_LIFE_S)
        except TimeoutError:
            return {}

    def headline(self) -> str:
        heads = [self.followed[id].head for id in self.ids if id in self.followed and self.followed[id].head]
        try:
            return headline(heads) if heads else ""
        except Exception:  # values of unexpected kinds
            return f"{len(heads)} records."


def _event(name: str, data: Any, id: str = "") -> str:
    return f"event: {name}\n{f'id: {id}{chr(10)}' if id else ''}data: {_to_json(data)}\n\n"


def _read_source(path: ConfinedPath, id: str) -> dict[str, Any]:
    """A record under the name the list has for it."""
    source = read_source(path)
    source |= {"id": id, "name": path.name if id == "." else id}
    return {**source, "summary": _sentence(source)}


def _sentence(source: Mapping[str, Any]) -> str:
    try:
        return sentence(source)
    except Exception:
        return f"{source['name']} cannot be summed up: it holds values of unexpected kinds."


def _to_json(value: Any) -> str:
    """JSON for a browser: a foreign record's NaN is null, and what JSON has no word for is text."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError):
        return json.dumps(finite(value), allow_nan=False, separators=(",", ":"), default=str)
