"""`paceline report`: records, scaling measurements and studies as one self-contained HTML page.

The page is a template, a style sheet and scripts from `assets/`, plotly's own script, and the sources as JSON. Nothing from a
record can become markup: the JSON contains no `<`, `>` or `&`, and the scripts set text as text. The page's content security
policy lets it load nothing.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.errors import PacelineError, RecordError, UsageError
from paceline.files import finite, write_file
from paceline.records import find_record
from paceline.report.read import STUDY_FILES, find_sources, kind_of, read_source
from paceline.report.summary import headline

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:;"
    " base-uri 'none'; form-action 'none'"
)
"""The content security policy of a page in a file: run its own scripts, load nothing."""

SCRIPTS = (
    *("state.js", "words.js", "nodes.js", "charts.js"),  # state, text, elements, cards with a chart
    *("curves.js", "steps.js", "scaling.js", "timeline.js", "study.js", "landscape.js"),  # sections with charts
    *("overview.js", "page.js"),  # sections without charts; puts the sections on the page
)
"""The scripts of the report and of the board, in the order they load: each uses those before it."""


def report_verb(records: Sequence[str], *, out: str = "", runs_dir: str = "runs") -> int:
    """Write a report of records, studies and results, by path or by name in runs_dir; without names, of the newest."""
    paths = [find_record(name, runs_dir) for name in records] or [_newest(Path(runs_dir))]
    where = write_report(paths, Path(out) if out else _beside(paths, Path(runs_dir)))
    print(f"report in {where}")
    return 0


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Write the page about these records to a file, complete or not at all. Returns its path."""
    out = out / "report.html" if out.is_dir() else out
    text = render([read_source(path) for path in dict.fromkeys(paths)])
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, text)
    except OSError as error:
        raise RecordError(f"cannot write the report to {out}: {error.strerror or error}; choose another --out") from error
    return out


def render(sources: Sequence[Mapping[str, Any]]) -> str:
    """The page about these sources, as HTML."""
    from jinja2 import Environment

    template = Environment(autoescape=True, keep_trailing_newline=True).from_string(asset("page.html"))
    heading = str(sources[0]["name"]) if len(sources) == 1 else f"{len(sources)} records" if sources else "No records"
    return template.render(
        title=f"{heading} · Paceline",
        heading=heading,
        headline=headline(sources),
        version=__version__,
        made=datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC"),
        policy=POLICY,
        style=asset("page.css"),
        plotly=plotly(),
        script="\n".join(_inline(asset(name)) for name in SCRIPTS),
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


@cache
def plotly() -> str:
    """plotly's script, from its package. The package itself is not imported: that would take half a second."""
    found = find_spec("plotly")
    folders = found.submodule_search_locations if found else None
    path = Path(next(iter(folders))) / "package_data" / "plotly.min.js" if folders else None
    if path is None or not path.is_file():
        raise PacelineError("plotly's script is not installed: pip install plotly")
    return _inline(path.read_text(encoding="utf-8"))


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


def _inline(script: str) -> str:
    """A script that is safe within a script element: nothing in it ends the element."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
