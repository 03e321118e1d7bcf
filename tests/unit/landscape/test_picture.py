"""Pictures of landscapes: what is in them, that they are the same each time, and that damaged files get an error or a gap."""

import sys
from pathlib import Path
from typing import Any

import pytest

from harness.pages import landscape, sharpness
from paceline.errors import RecordError, UsageError
from paceline.landscape.drawable import as_label, read_line, read_surface
from paceline.landscape.picture import draw, draw_many, draw_sharpness

# Imported before the tests, which may start no process: matplotlib asks fc-list for the fonts once per machine.
pytest.importorskip("matplotlib.font_manager", reason="needs matplotlib: pip install 'paceline[pictures]'")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("line", ["the model", "distance along the direction", "train", "validation", "accuracy"]),
        ("between", ["demo", "large", "share of the way to the second model"]),
        ("plane", ["the model", "first direction", "second direction", "loss (log scale)", "20"]),
        ("path", ["small", "large", "start", "end", "first principal component, 71% of the variance"]),
    ],
)
def test_an_svg_has_the_labels_and_is_the_same_each_time(tmp_path: Path, kind: str, words: list[str]) -> None:
    for name in ("a.svg", "b.svg"):
        draw(landscape(kind, 15), tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert [word for word in words if f">{word}</text>" not in text] == []
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert len(text) < 200_000
    assert "date" not in text


def test_a_png_in_3d_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        draw(landscape("path", 9), tmp_path / name, view="3d")
    content = (tmp_path / "a.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    assert content == (tmp_path / "b.png").read_bytes()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.png", "b.png"]


def test_losses_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    found = landscape("plane", 9)
    found["sets"]["train"]["loss"][0][:3] = [None, "inf", "nan"]
    assert read_surface(found).loss[0, :4].tolist()[3] > 0
    draw(found, tmp_path / "gaps.svg")
    assert ">not finite</text>" in (tmp_path / "gaps.svg").read_text()
    draw(found, tmp_path / "gaps.png", view="3d")
    line = landscape("line", 9)
    line["sets"]["train"]["loss"][4] = "inf"
    draw(line, tmp_path / "line.svg")
    draw(found, tmp_path / "validation.svg", shown="validation")
    assert ">not finite</text>" not in (tmp_path / "validation.svg").read_text()


def test_panels_have_their_titles_and_one_color_scale_where_asked(tmp_path: Path) -> None:
    high = landscape("plane", 9)
    high["sets"]["train"]["loss"] = [[50 * loss for loss in row] for row in high["sets"]["train"]["loss"]]
    founds, titles = [landscape("plane", 9), high, landscape("line", 9)], ["V = 1", "V = $64$", "a line"]
    texts = []
    for common in (False, True):
        draw_many(founds, titles, tmp_path / "many.svg", 2, common=common)
        texts.append((tmp_path / "many.svg").read_text())
        assert all(f">{title}</text>" in texts[-1] for title in titles)
    assert [text.count(">loss (log scale)</text>") for text in texts] == [2, 1]
    assert texts[1].count(">train</text>") == 1


def test_a_spectrum_has_its_largest_eigenvalue(tmp_path: Path) -> None:
    draw_sharpness(sharpness(), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert ">84</text>" in text
    assert ">largest eigenvalues</text>" in text
    damaged: list[Any] = [{}, {"hessian": 3}, {"hessian": {"density": {"x": [1, 2], "y": [1]}}}]
    damaged.append({"hessian": {"density": {"x": ["nan", 2], "y": [1, 0]}}})
    for each in damaged:
        with pytest.raises(RecordError, match="no spectrum to draw"):
            draw_sharpness(each, tmp_path / "b.svg")


def test_what_cannot_be_drawn_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plane = landscape("plane", 9)
    with pytest.raises(UsageError, match=r"a\.pdf is neither a \.png nor a \.svg file"):
        draw(plane, tmp_path / "a.pdf")
    with pytest.raises(UsageError, match="no set 'test': it has train, validation"):
        draw(plane, tmp_path / "a.png", shown="test")
    for wrong in ({"x": [0.0]}, {"y": "none"}, {"sets": None}, {"sets": {"train": {"loss": [[1, 2], [3]]}}}):
        with pytest.raises(RecordError, match="cannot be drawn"):
            draw({**plane, **wrong}, tmp_path / "a.png")
    with pytest.raises(RecordError, match="cannot be drawn: 9 places on a line"):
        read_line({**landscape("line", 9), "sets": {"train": {"loss": [1.0]}}})
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(RecordError, match="cannot write the picture to"):
        draw(landscape("line", 9), tmp_path / "folder.png")
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(UsageError, match=r"a\.png needs matplotlib: pip install 'paceline\[pictures\]'"):
        draw(plane, tmp_path / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_names_are_not_formulas_and_stay_in_the_legend() -> None:
    assert as_label("_a $x$\n") == r" _a \$x\$ "
    assert len(as_label("x" * 500)) < 60
