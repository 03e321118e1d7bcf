"""plotly's script, which draws the charts: inside each page, in one file that many pages share, or loaded from a URL.

The script is 4.8 MB, and the rest of a page is a few hundred kB. The plotly package is not imported: that would take half a
second, and only its one JavaScript file is needed.
"""

import base64
import hashlib
import os
import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, urlsplit

from paceline.errors import PacelineError, UsageError
from paceline.files import write_file

CDN = "https://cdn.plot.ly/plotly-{}.min.js"


@dataclass(frozen=True)
class Library:
    """How a page gets plotly's script."""

    script: str = ""
    """The script itself, safe within a script element; empty if the page loads it."""
    address: str = ""
    """The URL to load it from, absolute or relative to the page."""
    integrity: str = ""
    """The hash that the loaded script must have."""
    allowed: str = ""
    """What the page's content security policy must allow in addition."""

    @property
    def named(self) -> str:
        """The address for a sentence."""
        return "" if not self.address else self.address if "://" in self.address else f"the file {self.address}"


def plotly() -> str:
    """plotly's script, from its package, safe within a script element."""
    return inline(_content().decode())


def find_library(said: str, page: Path) -> Library:
    """The library for `--library`: empty (inside the page), `cdn`, a URL, or a file, which is written if it is missing."""
    if not said:
        return Library(script=plotly())
    if said == "cdn":  # plotly publishes the file of its package there, and checks it by this hash in its own pages
        digest = base64.b64encode(hashlib.sha256(_content()).digest()).decode()
        url = CDN.format(_version())
        return Library(address=url, integrity=f"sha256-{digest}", allowed=url)
    if "://" in said:
        return Library(address=said, allowed=_check_url(said))
    return _shared(Path(said), page)


def inline(script: str) -> str:
    """A script that is safe within a script element: nothing in it ends the element."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _check_url(url: str) -> str:
    """The URL as a source for a content security policy, where `;`, `,` and spaces would end it."""
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http") or not parts.hostname or re.search(r"[\s;,'\"<>]", url):
        raise UsageError(
            f"--library {url} is not a URL of a script: give https://HOST/PATH.js, cdn, or a file name ending in .js"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path}"  # a policy's source has no query


def _shared(path: Path, page: Path) -> Library:
    """A file that pages share. An existing file is used as it is: it may be another version, or the user's own build."""
    if path.suffix != ".js":
        raise UsageError(f"--library {path} is not a script: give a file name ending in .js, cdn, or a URL")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, _content().decode())
        relative = os.path.relpath(path.resolve(), page.resolve().parent)
    except (OSError, ValueError) as error:  # ValueError: on Windows, two drives have no relative path
        raise UsageError(
            f"cannot use --library {path}: {getattr(error, 'strerror', None) or error}; choose another file"
        ) from None
    return Library(address=quote(relative.replace(os.sep, "/")), allowed="'self' file:")


@cache
def _content() -> bytes:
    found = find_spec("plotly")
    folders = found.submodule_search_locations if found else None
    path = Path(next(iter(folders))) / "package_data" / "plotly.min.js" if folders else None
    if path is None or not path.is_file():
        raise PacelineError("plotly's script is not installed: pip install plotly")
    return path.read_bytes()


def _version() -> str:
    """The version in the script's own first lines."""
    found = re.search(rb"plotly\.js v(\d+\.\d+\.\d+)\b", _content()[:300])
    if found is None:
        raise UsageError("--library cdn needs a released version of plotly's script: give a file or a URL instead")
    return found[1].decode()
