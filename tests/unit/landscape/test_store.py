"""Points that are done survive an interruption, and only points of the same surface are used again."""

import math
from pathlib import Path

import pytest

from paceline.errors import RecordError
from paceline.landscape.store import Store

ABOUT = {"x": [0.0, 1.0], "seed": 0}
ROW = [[0.25, math.nan]]


def test_a_surface_continues_from_its_points(tmp_path: Path) -> None:
    path = tmp_path / "landscape" / "plane-0.part"
    path.parent.mkdir()
    store = Store(path, ABOUT, (1, 2))
    store.add([0, 7], [ROW, [[math.inf, 0.5]]])
    store.close(done=False)
    store = Store(path, ABOUT, (1, 2))
    assert sorted(store.values) == [0, 7]
    assert store.values[7] == [[math.inf, 0.5]]
    assert math.isnan(store.values[0][0][1])
    store.add([3], [ROW])
    store.close(done=False)
    assert sorted(Store(path, ABOUT, (1, 2)).values) == [0, 3, 7]


def test_points_of_another_surface_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "plane-0.part"
    Store(path, ABOUT, (1, 2)).add([0], [ROW])
    assert not Store(path, {**ABOUT, "seed": 1}, (1, 2)).values
    assert not Store(path, ABOUT, (1, 2)).values, "the file is about the other surface now"


def test_damaged_lines_are_evaluated_again(tmp_path: Path) -> None:
    path = tmp_path / "plane-0.part"
    store = Store(path, ABOUT, (1, 2))
    store.add([0], [ROW])
    store.add([1], [ROW])
    text = path.read_text()
    path.write_text(text[:-9])  # a power failure
    with path.open("a") as file:
        file.write('\n{"5": [[1.0]]}\n{"x": 3}\n[]\n{"6": [[0.5, 1.0]]}\n')
    assert sorted(Store(path, ABOUT, (1, 2)).values) == [0, 6]


def test_the_file_goes_when_the_result_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a" / "plane-0.part"
    path.parent.mkdir()
    Store(path, ABOUT, (1, 2)).close(done=True)
    assert not path.exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "landscape").write_text("a file")
    with pytest.raises(RecordError, match=r"cannot write .*plane-0\.part"):
        Store(tmp_path / "landscape" / "plane-0.part", ABOUT, (1, 2))
