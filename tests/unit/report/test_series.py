"""metrics.jsonl as columns: resumed runs, broken lines, and thinning that keeps every peak."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.records import read_metrics
from paceline.report.series import MOST_ROWS, Columns, LayerRows, number, read_metrics_columns, short, text, thin


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def step(at: int, **values: Any) -> dict[str, Any]:
    return {"kind": "step", "step": at, "epoch": 1, "time_s": at / 10, **values}


def test_rows_become_columns_with_gaps_where_a_row_had_no_number(tmp_path: Path) -> None:
    found = read_metrics_columns(
        write(tmp_path / "m", step(1, loss=2.0), step(2, loss="nan"), step(3, loss=1.0, noise_scale=7))
    )
    assert thin(found.step)["loss"] == [2, None, 1]
    assert thin(found.step)["noise_scale"] == [None, None, 7]


def test_components_of_a_step_are_columns_of_their_own_in_the_order_written(tmp_path: Path) -> None:
    row = {"kind": "health", "step": 1, "components_s": {"input": 0.1, "compute": 0.5, "other": "nan"}, "slowest": None}
    found = read_metrics_columns(write(tmp_path / "m", row))
    assert list(found.health.values) == ["step", "components_s.input", "components_s.compute"]


def test_rows_that_a_resumed_run_repeats_count_once(tmp_path: Path) -> None:
    epoch = {"kind": "epoch", "epoch": 1, "step": 2, "val_loss": 1.0}
    again = {"kind": "resume", "step": 2, "contract": {"workers": 3}}
    found = read_metrics_columns(
        write(
            tmp_path / "m", step(1), step(2, loss=5), epoch, step(3, loss=4), again, {**epoch, "val_loss": 2.0}, step(3, loss=3)
        )
    )
    assert thin(found.step)["step"] == [1, 2, 3]
    assert thin(found.step)["loss"] == [None, 5, 3]
    assert thin(found.epoch)["val_loss"] == [2]
    assert found.notes == ["resumed from step 2 on 3 workers"]


def test_a_join_says_what_it_cost_instead_of_a_plain_resume(tmp_path: Path) -> None:
    again = {"kind": "resume", "step": 2, "contract": {"workers": 3}}
    join = {"kind": "join", "step": 2, "epoch": 0.5, "workers": 3, "was": 1, "join_s": 1.5}
    join["components_s"] = {"stop": 0.25, "start": 1.25}
    found = read_metrics_columns(write(tmp_path / "m", step(1), step(2), again, join))
    assert found.notes == ["join after step 2: 1 to 3 workers in 1.5 s (stop 0.25 s, start 1.25 s)"]
    assert found.joins == [{"step": 2, "epoch": 0.5, "workers": 3, "was": 1, "join_s": 1.5}]
    for broken in ({**join, "was": "x"}, {**join, "was": 0}, {**join, "components_s": 3}, {"kind": "join"}):
        assert read_metrics_columns(write(tmp_path / "n", step(2), again, broken)).notes == ["resumed from step 2 on 3 workers"]


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["step", "epoch", "health", "phase", "join", "resume"]), st.integers(0, 4)), max_size=12
    )
)
def test_the_same_rows_are_left_out_as_by_read_metrics(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = tmp_path_factory.mktemp("record")
    each = {"epoch": 1, "global_batch": 8, "virtual_workers": 1, "workers": 2, "was": 1, "join_s": 1}
    write(
        path / "metrics.jsonl", *({"kind": kind, "step": at, "place": place, **each} for place, (kind, at) in enumerate(rows))
    )
    found = read_metrics_columns(path / "metrics.jsonl")
    for kind in ("step", "epoch", "health"):
        kept = [row["place"] for row in read_metrics(path) if row["kind"] == kind]
        assert thin(getattr(found, kind)).get("place", []) == kept
    for kind, listed in (("phase", found.phases), ("join", found.joins)):
        assert [each["step"] for each in listed] == [row["step"] for row in read_metrics(path) if row["kind"] == kind]


def test_a_phase_counts_once_where_a_resumed_run_begins_it_again(tmp_path: Path) -> None:
    first, second = (
        {"kind": "phase", "step": at, "epoch": at / 8, "global_batch": 8 + at, "virtual_workers": 2} for at in (0, 4)
    )
    found = read_metrics_columns(write(tmp_path / "m", first, second, {"kind": "resume", "step": 4}, second))
    assert [(phase["step"], phase["global_batch"]) for phase in found.phases] == [(0, 8), (4, 12)]
    found = read_metrics_columns(write(tmp_path / "n", first, second, {"kind": "resume", "step": 3}, step(4)))
    assert [phase["step"] for phase in found.phases] == [0]  # this time the batch did not grow


@pytest.mark.parametrize(
    "change", [{"global_batch": 0}, {"virtual_workers": "2"}, {"epoch": None}, {"global_batch": 10**400}, {"step": -1}]
)
def test_a_phase_that_cannot_be_drawn_is_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    row = {"kind": "phase", "step": 0, "epoch": 0, "global_batch": 8, "virtual_workers": 2, **change}
    assert read_metrics_columns(write(tmp_path / "m", row)).phases == []


def test_rows_after_an_end_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "m", step(1), step(2), step(3))
    line = path.stat().st_size // 3
    assert thin(read_metrics_columns(path, end=2 * line).step)["step"] == [1, 2]
    assert read_metrics_columns(path, end=0).step.count == 0


def test_invalid_lines_are_counted_but_not_the_one_being_written(tmp_path: Path) -> None:
    path = write(tmp_path / "m", step(1), "GARBAGE", [1, 2], {"no": "kind"}, '{"kind": 3}', "[" * 100_000)
    with path.open("ab") as file:
        file.write(b'\xff\xfe\n{"kind": "st')
    found = read_metrics_columns(path)
    assert (found.step.count, found.unreadable) == (1, 6)


def test_a_line_with_two_rows_is_invalid_and_spaces_are_allowed(tmp_path: Path) -> None:
    twice = '{"kind": "step", "step": 8}, {"kind": "step", "step": 9}'
    found = read_metrics_columns(write(tmp_path / "m", "  " + json.dumps(step(1)) + " \r", twice, "", step(2)))
    assert (thin(found.step)["step"], found.unreadable) == ([1, 2], 1)


def test_a_column_may_start_late_start_as_text_or_have_gaps(tmp_path: Path) -> None:
    rows = [step(1), step(2, loss="nan", lr=1), step(3, loss=1.5), step(4, loss=True), step(5), step(6, loss=0.5)]
    found = thin(read_metrics_columns(write(tmp_path / "m", *rows)).step)
    assert found["loss"] == [None, None, 1.5, None, None, 0.5]
    assert found["lr"] == [None, 1, None, None, None, None]


def test_a_long_series_is_thinned_and_keeps_ends_and_every_peak() -> None:
    columns = Columns()
    for at in range(50_000):
        columns.add(
            {"step": at, "loss": 100.0 if at == 31_337 else 1.0, "lr": -5.0 if at == 777 else 0.1, "gain": float("nan")}
        )
    found = thin(columns)
    assert len(found["step"]) <= MOST_ROWS
    assert (found["step"][0], found["step"][-1]) == (0, 49_999)
    assert found["step"][found["loss"].index(100)] == 31_337
    assert found["step"][found["lr"].index(-5)] == 777
    assert found["step"] == sorted(found["step"])


def test_a_short_series_is_left_as_it_is() -> None:
    columns = Columns()
    for at in range(100):
        columns.add({"step": at})
    assert thin(columns)["step"] == list(range(100))


def test_foreign_rows_cannot_add_unlimited_columns() -> None:
    columns = Columns()
    columns.add({f"c{at}": at for at in range(5_000)})
    columns.add({"x" * 10_000: 1, "c0": 10**400})
    assert len(columns.values) < 100
    assert math.isnan(columns.values["c0"][-1])


@pytest.mark.parametrize(
    ("value", "expected"), [(1, 1.0), (0.5, 0.5), (True, None), ("nan", None), (math.inf, None), (10**400, None), ([], None)]
)
def test_only_finite_numbers_are_numbers(value: Any, expected: float | None) -> None:
    assert number(value) == expected


def test_numbers_are_cut_to_what_a_chart_shows() -> None:
    assert short(2 / 3) == 0.6666667
    assert isinstance(short(3.0), int)
    assert short(math.nan) is None


def test_text_has_no_control_characters_and_is_cut() -> None:
    assert text("a\x1b[31m\nb") == "a [31m b"
    assert len(text("x" * 1_000_000)) < 3_000
    assert text(None) == ""


def layers(at: int, *ratios: Any, **fields: Any) -> dict[str, Any]:
    names = [f"conv{number}" for number in range(len(ratios))]
    about = {"names": names, "gradient_norm": [1.0] * len(ratios), "update_ratio": list(ratios)}
    return {**step(at), "kind": "layers", **about, **fields}


def test_layers_become_one_line_each(tmp_path: Path) -> None:
    found = read_metrics_columns(write(tmp_path / "m", layers(5, 0.001, None), layers(10, 0.00123456, 0.0))).layers.view()
    assert found == {
        "names": ["conv0", "conv1"],
        "count": 2,
        "step": [5, 10],
        "epoch": [1, 1],
        "time_s": [0.5, 1.0],
        "update_ratio": [[0.001, 0.00123], [None, 0.0]],
        "gradient_norm": [[1, 1], [1, 1]],
    }
    assert read_metrics_columns(write(tmp_path / "m", step(1))).layers.view() is None


def test_rows_of_layers_that_are_damaged_or_do_not_fit_are_left_out(tmp_path: Path) -> None:
    bad: list[Any] = [
        layers(1, 0.1, names="conv0"),
        layers(1, 0.1, names=None),
        layers(1, 0.1, update_ratio=[0.1, 0.2]),
        layers(1, 0.1, gradient_norm={"conv0": 1}),
        layers(1),
        {"kind": "layers", "names": ["a"], "gradient_norm": [1], "update_ratio": [1]},
        {"kind": "layers", "step": 3},
        '{"kind": "layers", "step": 3, "names": ["a"',
    ]
    good = layers(4, 0.1, 0.2)
    late = [layers(5, 0.1), layers(6, "fast", -1.0), layers(7, 10**400, True)]
    found = read_metrics_columns(write(tmp_path / "m", *bad, good, *late)).layers.view()
    assert found is not None
    assert found["step"] == [4, 6, 7]
    assert found["update_ratio"] == [[0.1, None, None], [0.2, None, None]]


def test_rows_of_layers_that_a_resumed_run_repeats_count_once(tmp_path: Path) -> None:
    again = {"kind": "resume", "step": 5}
    found = read_metrics_columns(write(tmp_path / "m", layers(5, 1.0), layers(10, 2.0), again, layers(10, 3.0))).layers.view()
    assert found is not None
    assert (found["step"], found["update_ratio"]) == ([5, 10], [[1, 3]])


@pytest.mark.parametrize(("rows", "many"), [(500, 1), (501, 2), (999, 3), (1000, 401), (5000, 900)])
def test_many_layers_and_rows_are_thinned_evenly(tmp_path: Path, rows: int, many: int) -> None:
    wide = LayerRows()
    for at in range(1, rows + 1):
        wide.add(layers(at, *[0.1] * many))
    found = wide.view()
    assert found is not None
    assert (found["count"], len(found["names"])) == (many, min(many, 400))
    assert found["names"][0] == "conv0"
    assert found["names"][-1] == f"conv{many - 1}"
    steps = found["step"]
    assert 250 <= len(steps) <= 500
    assert steps[0] == 1
    gaps = {b - a for a, b in pairwise(steps)}
    assert max(gaps) <= 2 * min(gaps)
    assert rows - steps[-1] <= max(gaps)
