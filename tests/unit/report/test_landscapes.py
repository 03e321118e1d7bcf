"""Loss surfaces and sharpness as the page shows them: checked, thinned, and never an exception."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.pages import landscape, make_landscapes, make_sharpness, make_train, sharpness
from paceline.report.confined import ConfinedPath
from paceline.report.landscapes import MOST_FILES, MOST_SIDE, view_landscape, view_landscapes, view_sharpness
from paceline.report.read import read_source


def view(found: Any) -> Any:
    problems: list[str] = []
    made = view_landscape("a", found, problems)
    assert (made is None) == bool(problems)
    return made


def test_all_kinds_are_read_with_their_sets_in_order(tmp_path: Path) -> None:
    source = read_source(make_sharpness(make_landscapes(make_train(tmp_path / "r"))))
    assert source["problems"] == []
    found = {each["kind"]: each for each in source["landscapes"]}
    assert [each["name"] for each in source["landscapes"]] == ["between-large", "line-0", "path", "plane-0"]
    assert [each["name"] for each in found["plane"]["sets"]] == ["train", "validation"]
    assert (len(found["plane"]["sets"][0]["loss"]), len(found["line"]["sets"][0]["loss"])) == (31, 31)
    assert found["between"]["ends"] == ["demo", "large"]
    assert found["path"]["explained"] == [0.71, 0.18]
    assert [(path["name"], path["step"][-1]) for path in found["path"]["paths"]] == [("small", 240), ("large", 240)]
    assert found["line"]["paths"] == found["plane"]["explained"] == []
    assert found["plane"]["facts"][0] == "1,000 samples of each set"
    assert found["plane"]["facts"][-1] == "measured in 12.5 s on 2 workers"
    assert source["sharpness"]["top"][0] == 84
    json.dumps(source, allow_nan=False)


def test_losses_that_are_not_finite_are_gaps_and_names_are_plain_text() -> None:
    found = view(
        {
            **{"kind": "line", "x": [0, 1, 2, 3], "about": "a\nb\x1b[31m", "samples": {"x\ty": 1e999, "z": 2}},
            "sets": {"a\x00b": {"loss": [1.0, "inf", None, 2.123456789]}, "none": {"loss": ["nan"] * 4}},
        }
    )
    assert found["sets"] == [{"name": "a b", "loss": [1, None, None, 2.1235], "accuracy": None}]
    assert found["about"] == "a b [31m"
    assert found["facts"] == ["2 z samples"]


def test_long_sides_are_thinned_and_keep_their_ends_and_the_middle() -> None:
    side = 3 * MOST_SIDE
    x = [float(index - side // 2) for index in range(side)]
    loss = [[abs(a) + abs(b) + 1 for a in x] for b in x[:3]]
    found = view({"kind": "plane", "x": x, "y": [0, 1, 2], "sets": {"train": {"loss": loss}}})
    assert (found["thinned"], len(found["x"]), len(found["sets"][0]["loss"][0]), len(found["y"])) == (
        True,
        MOST_SIDE,
        MOST_SIDE,
        3,
    )
    assert (found["x"][0], found["x"][MOST_SIDE // 2], found["x"][-1]) == (x[0], 0, x[-1])
    assert found["sets"][0]["loss"][0][MOST_SIDE // 2] == loss[0][side // 2]
    assert view(landscape("plane"))["thinned"] is False
    lost = [[1.0 if index == 1 else None for index in range(side)] for _ in loss]
    assert view({"kind": "plane", "x": x, "y": [0, 1, 2], "sets": {"train": {"loss": lost}}}) is None  # thinned, it is empty


PLANE = {"kind": "plane", "x": [0, 1], "y": [0, 1, 2], "sets": {"train": {"loss": [[1, 2], [1, 2], [1, 2]]}}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": None},
        {"kind": ["plane"]},
        {"kind": "cube"},
        {"x": 3},
        {"x": []},
        {"x": [0, "1"]},
        {"x": [1, 0]},
        {"x": list(range(5_000))},
        {"y": None},
        {"sets": []},
        {"sets": {"train": 3}},
        {"sets": {"train": {"loss": [1, 2]}}},
        {"sets": {"train": {"loss": [[1, 2], [1, 2]]}}},
        {"sets": {"train": {"loss": [[1, 2], [1, 2], [1]]}}},
        {"sets": {"train": {"loss": [["nan", None]] * 3}}},
    ],
    ids=str,
)
def test_a_landscape_whose_sizes_do_not_match_is_a_problem(wrong: dict[str, Any]) -> None:
    assert view(PLANE)
    assert view({**PLANE, **wrong}) is None


def test_damaged_parts_are_left_out() -> None:
    runs = [{"name": 3, "x": [0, None, 2], "y": [0, 1, 2, 3], "step": [0]}, 7, {"x": [1]}, {"x": "a", "y": "b"}]
    more = {"paths": runs, "explained": ["nan", 0.5], "samples": 3, "seed": "s", "time_s": None, "workers": -1, "ends": 4}
    found = view({**PLANE, **more, "kind": "path"})
    assert found["paths"] == [
        {"name": "3", "x": [0, 2], "y": [0, 2], "step": [0, None], "loss": [None, None], "off": [None, None]}
    ]
    assert found["explained"] == [0.5]
    assert found["facts"] == []
    wrong = {"train": {"loss": PLANE["sets"]["train"]["loss"], "accuracy": [[1, 2]]}}  # type: ignore[index]
    assert view({**PLANE, "sets": wrong})["sets"][0]["accuracy"] is None


def test_too_many_files_links_and_pipes(tmp_path: Path) -> None:
    record = make_landscapes(make_train(tmp_path / "runs" / "r"), ("plane",))
    folder = record / "landscape"
    os.mkfifo(folder / "a.json")
    (folder / "b.json").mkdir()
    (tmp_path / "secret.json").write_text(json.dumps(landscape("line")))
    (folder / "c.json").symlink_to(tmp_path / "secret.json")
    (folder / "d.json").write_text("{")
    (folder / ".e.json").write_text("{")
    confined = ConfinedPath(record.resolve(), record.parent.resolve())
    problems: list[str] = []
    assert [each["name"] for each in view_landscapes(confined, problems)] == ["plane-0"]
    assert problems == ["landscape/d.json cannot be read: it is not valid JSON, or was cut short"]
    for place in range(MOST_FILES):
        (folder / f"x{place:02}.json").write_text(json.dumps(landscape("line", 5)))
    source = read_source(record)
    assert source["problems"][0] == f"landscape has {MOST_FILES + 5} files: only the first {MOST_FILES} by name are shown"
    os.rename(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert view_landscapes(confined, problems) == []


def test_sharpness_without_some_of_its_parts() -> None:
    problems: list[str] = []
    found = view_sharpness(sharpness(), problems)
    assert found
    assert (found["keskar"][2], found["sam"], found["trace_error"]) == (
        {"space": "subspace", "epsilon": 0.001, "sharpness": 2.125},
        {"rho": 0.05, "rise": 0.031},
        18,
    )
    only = view_sharpness(
        {"sam": {"rho": 0.05, "rise": 0.1}, "hessian": {"top": "x", "density": {"x": [0, 1], "y": [1, "nan"]}}}, problems
    )
    assert only
    assert (only["keskar"], only["adaptive"], only["top"], only["density"]) == ([], {}, [], {"x": [0], "y": [1]})
    assert problems == []
    for empty in ({"loss": 1.0}, {"keskar": [{"epsilon": 1}], "hessian": [], "sam": 3}):
        assert view_sharpness(empty, problems) is None
    assert problems == ["sharpness.json has no measurement that a page can show"] * 2


def test_a_file_of_a_landscape_stands_for_its_record(tmp_path: Path) -> None:
    record = make_sharpness(make_landscapes(make_train(tmp_path / "r")))
    assert read_source(record / "landscape" / "path.json")["name"] == "r"
    assert read_source(record / "sharpness.json")["name"] == "r"
