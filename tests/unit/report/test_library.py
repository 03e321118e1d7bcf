"""Where a page gets plotly's script from: inside, a shared file, a URL; and that the page may load nothing else."""

import base64
import hashlib
import html
import re
from pathlib import Path

import pytest

from harness.pages import make_train
from paceline.errors import PacelineError, UsageError
from paceline.report import library
from paceline.report.library import find_library, plotly
from paceline.report.page import report_verb


def loads(page: Path) -> tuple[list[str], str]:
    """The scripts that a page loads, and its policy about scripts."""
    text = page.read_text()
    policy = html.unescape(re.search(r'Security-Policy" content="([^"]*)"', text)[1])  # type: ignore[index]
    return re.findall(r"<script src=\"([^\"]*)\"", text), re.search(r"script-src ([^;]*);", policy)[1]  # type: ignore[index]


def test_pages_share_a_file_that_is_written_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_train(runs / "one")
    make_train(runs / "two")
    report_verb(["one"], library="runs/shared/plotly.min.js")
    file = runs / "shared" / "plotly.min.js"
    assert file.read_bytes() == library._content()
    file.write_text("// my own build")
    report_verb(["one", "two"], library="runs/shared/plotly.min.js")
    assert file.read_text() == "// my own build"  # an existing file is used as it is
    assert loads(runs / "one" / "report.html") == (["../shared/plotly.min.js"], "'unsafe-inline' 'self' file:")
    assert loads(runs / "report.html")[0] == ["shared/plotly.min.js"]
    assert (runs / "one" / "report.html").stat().st_size < 400_000
    assert "self-contained" not in (runs / "report.html").read_text()


def test_the_cdn_is_pinned_by_version_and_hash(runs: Path) -> None:
    make_train(runs / "one")
    report_verb(["one"], library="cdn")
    page = runs / "one" / "report.html"
    [url], policy = loads(page)
    version = re.fullmatch(r"https://cdn\.plot\.ly/plotly-(\d+\.\d+\.\d+)\.min\.js", url)
    assert version
    assert f"plotly.js v{version[1]}".encode() in library._content()[:100]
    assert policy == f"'unsafe-inline' {url}"
    digest = base64.b64encode(hashlib.sha256(library._content()).digest()).decode()
    assert f'integrity="sha256-{digest}" crossorigin="anonymous"' in html.unescape(page.read_text())


def test_a_url_is_used_as_given_and_is_all_that_the_page_may_load(runs: Path) -> None:
    make_train(runs / "one")
    report_verb(["one"], library="https://files.example/js/plotly.js?v=1&x=2")
    urls, policy = loads(runs / "one" / "report.html")
    assert urls == ["https://files.example/js/plotly.js?v=1&amp;x=2"]
    assert policy == "'unsafe-inline' https://files.example/js/plotly.js"


@pytest.mark.parametrize("said", ["ftp://x/y.js", "https://x/y.js; connect-src *", "https:///y.js", "https://x/y.js 'self'"])
def test_a_url_cannot_widen_the_policy(said: str) -> None:
    with pytest.raises(UsageError, match=r"is not a URL of a script: give https://HOST/PATH\.js, cdn, or a file name"):
        find_library(said, Path("report.html"))


def test_only_a_script_file_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a script: give a file name ending in \.js, cdn, or a URL"):
        find_library(str(tmp_path / "result.json"), tmp_path / "report.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot use --library .*; choose another file"):
        find_library(str(tmp_path / "file" / "plotly.js"), tmp_path / "report.html")


def test_without_plotly_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.report.library.find_spec", lambda name: None)
    library._content.cache_clear()
    with pytest.raises(PacelineError, match="pip install plotly"):
        plotly()
