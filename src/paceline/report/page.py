"""`paceline report`: records, scaling measurements and studies as one self-contained HTML page.

The page is a template, a style sheet and scripts from `assets/`, plotly's own script (or where to load it from: `library.py`),
and the sources as JSON. Nothing from a record can become markup: the JSON contains no `<`, `>` or `&`, and the scripts set text
as text. The page's content security policy lets it load nothing else.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.errors import RecordError, UsageError
from paceline.files import finite, write_file
from paceline.records import find_record
from paceline.report.library import Library, find_library, inline, plotly
from paceline.report.read import read_source
from paceline.report.sources import STUDY_FILES, find_sources, kind_of
from paceline.report.summary import headline

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:;"
    " base-uri 'none'; form-action 'none'"
)
"""The content security policy of a page in a file: run its own scripts, load nothing. A library outside the page is added."""

SCRIPTS = (
    *("state.js", "words.js", "nodes.js", "charts.js", "axes.js"),  # state, text, elements, cards with a chart, their axes
    "phases.js",  # the columns of a run
    *("curves.js", "steps.js", "scaling.js", "timeline.js", "study.js"),  # sections with charts
    *("surface.js", "landscape.js", "sharpness.js"),  # surfaces, and the sections that show them
    *("overview.js", "page.js"),  # sections without charts; puts the sections on the page
)
"""The scripts of the report and of the board, in the order they load: each uses those before it."""


def report_verb(records: Sequence[str], *, out: str = "", runs_dir: str = "runs", library: str = "") -> int:
    """Write a report of records, studies and results, by path or by name in runs_dir; without names, of the newest."""
    paths = [find_record(name, runs_dir) for name in records] or [_newest(Path(runs_dir))]
    where = write_report(paths, Path(out) if out else _beside(paths, Path(runs_dir)), library)
    print(f"report in {where}")
    return 0


def write_report(paths: Sequence[Path], out: Path, library: str = "") -> Path:
    """Write the page about these records to a file, complete or not at all. Returns its path."""
    out = out / "report.html" if out.is_dir() else out
    text = render([read_source(path) for path in dict.fromkeys(paths)], find_library(library, out))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, text)
    except OSError as error:
        raise RecordError(f"cannot write the report to {out}: {error.strerror or error}; choose another --out") from error
    return out


def render(sources: Sequence[Mapping[str, Any]], library: Library | None = None) -> str:
    """The page about these sources, as HTML; with plotly's script inside if no library is given."""
    from jinja2 import Environment

    library = library or Library(script=plotly())
    template = Environment(autoescape=True, keep_trailing_newline=True).from_string(asset("page.html"))
    heading = str(sources[0]["name"]) if len(sources) == 1 else f"{len(sources)} records" if sources else "No records"
    return template.render(
        title=f"{heading} · Paceline",
        heading=heading,
        headline=headline(sources),
        version=__version__,
        made=datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC"),
        policy=POLICY.replace("'unsafe-inline'", f"'unsafe-inline' {library.allowed}".rstrip(), 1),
        style=asset("page.css"),
        library=library,
        script="\n".join(inline(asset(name)) for name in SCRIPTS),
        data=embed(list(sources)),
    )


def embed(value: Any) -> str:
    """A value as JSON that is safe within a script element: no text in it can end the element or start another."""
    text = json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode()  # a file name that is not valid text has lone surrogates


def asset(name: str) -> str:
    """A file of the page, as text."""
    return (files("paceline.report") / "assets" / name).read_text(encoding="utf-8")


def _newest(runs_dir: Path) -> Path:
    found = find_sources(runs_dir)
    if not found:
        raise UsageError(f"{runs_dir} has no record to report on: name one, or make one with paceline train")
    return found[-1]


def _beside(paths: Sequence[Path], runs_dir: Path) -> Path:
    """Where a report goes: into its record; into runs_dir for several records, or for results outside a record."""
    if len(set(paths)) > 1:
        return runs_dir / "report.html"
    path = paths[0]
    if path.is_dir():
        return path / "report.html"
    inside = path.name in STUDY_FILES or kind_of(path.parent) != "unknown"
    return path.parent / "report.html" if inside else runs_dir / f"report-{path.stem}.html"
