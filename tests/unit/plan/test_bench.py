"""bench/plan.py's own logic, without running anything; and that docs/plan.md shows its results."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.plan.plan import Request, make_plan

ROOT = Path(__file__).parents[3]
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def bench() -> Any:
    """bench/plan.py as a module."""
    path = list(sys.path)
    sys.path.insert(0, str(ROOT / "bench"))
    spec = importlib.util.spec_from_file_location("bench_plan", ROOT / "bench" / "plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_plan"] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_machines_that_follow_the_model_are_predicted_exactly(bench: Any, make_scale: Make) -> None:
    make_scale("sleeper-loopback", counts=(1, 2, 3, 4), bytes_per_s=1e12, latency_s=1e-6)
    folder = make_scale("sleeper-1gbit", counts=(1, 2, 3, 4), on_node=1, network=(150e-6, 0.115e9))
    fitted, filed = bench.judge(folder.parent, "sleeper", "1gbit")
    assert [row["workers"] for row in fitted["rows"]] == [3, 4]
    assert [row["workers"] for row in filed["rows"]] == [2, 3, 4]
    assert all(abs(row["error"]) < 0.001 for row in fitted["rows"] + filed["rows"])
    assert fitted["assumed_link"]["bandwidth_GBps"] == pytest.approx(0.115, rel=1e-3)


def test_errors_are_those_of_the_product_with_the_same_inputs(bench: Any, make_scale: Make) -> None:
    cpu = {"devices": "1 CPU worker, 1 thread (2 cores, no GPU)", "backend": "gloo"}
    for task, link, on_node, cores in (
        ("cnn", "loopback", None, ""),
        ("cnn", "1gbit", 1, "2"),
        ("sleeper", "1gbit", 1, "none"),
    ):
        folder = make_scale(f"{task}-{link}", counts=(1, 2, 3, 4), on_node=on_node, contract=cpu)
        case = bench.judge(folder.parent, task, link)[0]
        first = Request(record=str(bench.cut(folder, 2)), cluster="here", workers="3,4", cores=cores)
        assert [row["predicted"] for row in case["rows"]] == [round(row["samples_per_s"], 2) for row in make_plan(first).rows]
        assert case["cores"] == (cores or "as measured")


def test_a_fit_never_sees_what_it_predicts(bench: Any, make_scale: Make) -> None:
    cut = json.loads((bench.cut(make_scale("whole", counts=(1, 2, 3, 4)), 2) / "scale.json").read_text())
    assert {count["workers"] for count in cut["counts"]} == {1, 2}
    assert {link["workers"] for link in cut["links"]} == {2}


def test_the_table_states_the_error(bench: Any, make_scale: Make) -> None:
    folder = make_scale("sleeper-loopback", counts=(1, 2, 3, 4))
    found = json.loads((folder / "scale.json").read_text())
    found["counts"][3]["samples_per_s"] *= 0.5
    (folder / "scale.json").write_text(json.dumps(found))
    said = bench.table({"cases": bench.judge(folder.parent, "sleeper", "loopback")})
    lines = said.splitlines()
    assert lines[2].startswith("| sleeper | loopback | 1 and 2 workers on it | 3 |")
    assert lines[3].endswith("| +100.0% |") or float(lines[3].split("|")[-2].strip(" %")) > 90
    assert "Of 2 predictions 1 are within 10%" in said


def test_without_root_shaped_links_say_so(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="need root"), bench.nodes_on_a_bridge(2, "1gbit", "128kb"):
        pass


@pytest.mark.parametrize("name", ["plan", "plan_16_cores"])
def test_the_page_shows_the_committed_results(bench: Any, name: str) -> None:
    found = json.loads(bench.RESULTS.with_stem(name).read_text())
    assert bench.table(found) in (ROOT / "docs" / "plan.md").read_text()
