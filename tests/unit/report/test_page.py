"""The page as a file: where it is written, that it is self-contained, and that no record can inject markup."""

import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from harness.pages import make_scale, make_train
from paceline.board.board import own_asset
from paceline.errors import RecordError, UsageError
from paceline.records import find_record
from paceline.report.library import plotly
from paceline.report.page import POLICY, SCRIPTS, asset, embed, render, report_verb, write_report
from paceline.report.read import read_source

BOARD_SCRIPTS = [path.name for path in (files("paceline.board") / "assets").iterdir() if path.name.endswith(".js")]
EVIL = "</script><script>alert(1)</script><!--&\u2028"


class Scripts(HTMLParser):
    """The page as a browser parses it: its elements, and the text of its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts[-1] += data


def test_the_page_holds_everything_and_may_load_nothing(tmp_path: Path) -> None:
    page = Scripts(render([read_source(make_train(tmp_path / "demo"))]))
    assert page.tags.count("script") == 4  # the sources, the page's scripts, plotly, and the call that draws
    assert page.scripts[2].strip() == plotly().strip()
    addresses = [value for name, value in page.attributes if name in ("src", "href", "action", "data")]
    assert all(str(value).startswith(("#", "data:")) for value in addresses)
    assert "default-src 'none'" in POLICY
    assert "connect-src" not in POLICY
    assert ("content", POLICY) in page.attributes


def test_no_name_or_value_breaks_out_of_the_page(tmp_path: Path) -> None:
    source = read_source(make_train(tmp_path / "x", model=EVIL, task=EVIL)) | {"name": EVIL, "summary": EVIL, "notes": [EVIL]}
    html = render([source])
    page, plain = Scripts(html), Scripts(render([read_source(tmp_path / "x") | {"name": "x"}]))
    assert page.tags == plain.tags  # no additional element
    assert json.loads(page.scripts[0])[0]["name"] == EVIL
    assert "alert(1)</script>" not in html


def test_embedded_json_is_inert_and_reads_back() -> None:
    value = {"a": [EVIL, float("nan"), float("inf"), 1.5, None], "\ud800": ("t",)}
    text = embed(value)
    assert not re.search("[<>&\u2028\u2029]", text)
    assert json.loads(text)["a"] == [EVIL, None, None, 1.5, None]


def test_the_headline_and_the_title_are_in_the_html_itself(tmp_path: Path) -> None:
    html = render([read_source(make_train(tmp_path / "demo"))])
    assert "<title>demo · Paceline</title>" in html
    assert '<p id="headline">demo trained cnn on fashion-mnist-mini' in html
    assert "No record to show" in render([])


def test_where_the_report_of_one_or_several_records_goes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_train(runs / "one")
    make_scale(runs / "two")
    assert report_verb(["one"]) == 0
    assert capsys.readouterr().out == "report in runs/one/report.html\n"
    report_verb(["one", "runs/two"])
    assert capsys.readouterr().out == "report in runs/report.html\n"
    report_verb(["two/scale.json"])
    assert capsys.readouterr().out == "report in runs/two/report.html\n"
    report_verb(["one"], out="new/folder/page.html")
    assert capsys.readouterr().out == "report in new/folder/page.html\n"
    assert "<!doctype html>" in Path("new/folder/page.html").read_text()[:20]
    assert not list(Path().rglob("*.part"))


def test_without_a_name_the_newest_record_is_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="runs has no record"):
        report_verb([])
    make_train(runs / "only")
    report_verb([])
    assert "runs/only/report.html" in capsys.readouterr().out


def test_the_page_of_results_outside_a_record_goes_to_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_verb([str(Path(__file__).parents[3] / "studies" / "results" / "batch.json")])
    assert capsys.readouterr().out == "report in runs/report-batch.html\n"


def test_an_unknown_name_is_one_line_with_the_nearest(runs: Path) -> None:
    make_train(runs / "demo")
    with pytest.raises(UsageError, match=r"no record 'dmeo', neither here nor in runs: did you mean demo\?"):
        find_record("dmeo", "runs")
    with pytest.raises(UsageError, match="the newest there: demo"):
        find_record("zzzzzz", "runs")
    with pytest.raises(UsageError, match="has no records"):
        find_record("", "nowhere")


def test_a_page_that_cannot_be_written_is_one_line_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, out = make_train(tmp_path / "r"), tmp_path / "page.html"
    out.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.records.os.fsync", full)
    with pytest.raises(RecordError, match="No space left on device; choose another --out"):
        write_report([record], out)
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "r"]


def test_a_broken_record_still_has_a_page(tmp_path: Path) -> None:
    path = tmp_path / "broken"
    path.mkdir()
    (path / "metrics.jsonl").write_bytes(b"\x00\xff\n")
    assert "metrics.jsonl: 1 line" in write_report([path], tmp_path / "p.html").read_text()


def test_every_script_has_its_place_and_is_short_enough_to_read() -> None:
    found = {path.name for path in (files("paceline.report") / "assets").iterdir() if path.name.endswith(".js")}
    assert found == set(SCRIPTS)
    assert len(SCRIPTS) == len(set(SCRIPTS))
    assert {name: lines for name in found if (lines := asset(name).count("\n")) > 400} == {}
    assert {name: lines for name in BOARD_SCRIPTS if (lines := own_asset(name).count("\n")) > 400} == {}


def test_the_scripts_never_set_markup() -> None:
    for script in (*map(asset, SCRIPTS), *map(own_asset, BOARD_SCRIPTS)):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)
