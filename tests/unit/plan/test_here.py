"""The machine of a record, as a cluster."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import RecordError
from paceline.plan.here import make_here
from paceline.plan.measured import read_measured
from paceline.plan.plan import Plan, Request, as_json, introduce, make_plan

Make = Callable[..., Path]


def test_one_node_has_one_link(make_scale: Make) -> None:
    here = make_here(read_measured(make_scale(counts=(1, 2, 4))))
    assert here.inter is None
    assert here.intra is not None
    assert here.intra.bytes_per_s.typical == pytest.approx(1e9, rel=1e-3)
    assert here.nodes(64) == 1


def test_one_worker_per_node_has_only_a_network(make_scale: Make) -> None:
    here = make_here(read_measured(make_scale(counts=(1, 2, 3), on_node=1)))
    assert here.intra is None
    assert here.inter is not None
    assert here.inter.latency_s.typical == pytest.approx(1e-3, rel=1e-3)
    assert here.inter.bytes_per_s.typical == pytest.approx(1e8, rel=1e-3)
    assert (here.workers_per_node, here.nodes(4)) == (1, 4)


def test_several_workers_per_node_have_both_links_and_more_nodes_are_predicted(make_scale: Make) -> None:
    whole = read_measured(make_scale("whole", counts=(1, 2, 4, 8, 16), on_node=2))
    folder = make_scale("first", counts=(1, 2, 4), on_node=2)
    here = make_here(read_measured(folder))
    assert here.intra is not None
    assert here.inter is not None
    assert here.intra.bytes_per_s.typical == pytest.approx(1e9, rel=1e-3)
    assert here.inter.latency_s.typical == pytest.approx(1e-3, rel=1e-2)
    assert here.inter.bytes_per_s.typical == pytest.approx(1e8, rel=1e-2)
    plan = make_plan(Request(record=str(folder), cluster="here", workers="1,2,4,8,16"))
    assert [row["nodes"] for row in plan.rows] == [1, 1, 2, 4, 8]
    for row, truth in zip(plan.rows, whole.points, strict=True):
        assert row["samples_per_s"] == pytest.approx(truth.samples_per_s, rel=0.01)


def test_a_missing_link_of_two_is_named(make_scale: Make) -> None:
    with pytest.raises(RecordError) as caught:
        make_here(read_measured(make_scale(counts=(1, 4), on_node=2)))
    assert "has 2 workers per node but timed no all-reduces within one" in str(caught.value)
    assert "measure 2 workers on one node" in str(caught.value)


def test_counts_with_different_workers_per_node_are_refused(make_scale: Make) -> None:
    folder = make_scale(counts=(1, 2, 4), on_node=2)
    found = json.loads((folder / "scale.json").read_text())
    found["counts"][1]["nodes"] = 2
    (folder / "scale.json").write_text(json.dumps(found))
    with pytest.raises(RecordError, match=r"4 workers on 2 nodes, but 2 on 2: .* measure every count with 2 per node"):
        make_here(read_measured(folder))


def test_a_network_that_was_not_timed_is_refused(make_scale: Make) -> None:
    folder = make_scale(counts=(1, 2), on_node=1, reduce_s=0.0)
    found = json.loads((folder / "scale.json").read_text())
    (folder / "scale.json").write_text(json.dumps({**found, "links": []}))
    with pytest.raises(RecordError, match="timed no all-reduces between its nodes"):
        make_here(read_measured(folder))


def test_cores_that_carry_the_link_count_in_the_fit(make_scale: Make) -> None:
    """Four workers on two cores took twice as long as the link alone, but the link itself is not slower."""
    cpu = {"devices": "4 CPU workers, 1 thread each (2 cores, no GPU)", "backend": "gloo"}
    folder = make_scale(counts=(4,), contract=cpu)
    here = make_here(read_measured(folder))
    assert here.intra is not None
    assert here.link_cores == 2
    assert here.intra.bytes_per_s.typical == pytest.approx(2e9, rel=1e-3)


def test_the_error_of_the_fit_is_stated_as_a_factor(make_scale: Make) -> None:
    folder = make_scale()
    assert "typically off by a factor of 1.00, at worst 1.00" in make_here(read_measured(folder)).source
    assert not any("trust this prediction less" in line for line in introduce(plan_of(folder)))
    found = json.loads((folder / "scale.json").read_text())
    for each, times in zip(found["links"], (1, 1, 100, 1), strict=True):
        each["s"] *= times
    (folder / "scale.json").write_text(json.dumps(found))
    here = make_here(read_measured(folder))
    assert here.off > 2
    assert f"typically off by a factor of {here.off:.2f}, at worst " in here.source
    assert float(here.source.split()[-1]) >= here.off
    warning = "warning: latency and bandwidth do not describe the link well: trust this prediction less"
    assert warning in introduce(plan_of(folder))


def test_an_unlimited_node_is_null_in_json(make_scale: Make) -> None:
    assert as_json(plan_of(make_scale()))["cluster"]["workers_per_node"] is None
    assert as_json(plan_of(make_scale("apart", on_node=1)))["cluster"]["workers_per_node"] == 1


def test_the_command_that_measures_what_is_missing_trains_the_same_model(make_scale: Make) -> None:
    odd = {"model": "resnet:depth=8"}
    with pytest.raises(RecordError, match=r"paceline scale fashion-mnist-mini --model resnet:depth=8 --workers 1,2"):
        make_here(read_measured(make_scale(counts=(1,), contract=odd)))
    with pytest.raises(RecordError, match=r"--model resnet:depth=8 --workers 1,2\)"):
        make_here(read_measured(make_scale(counts=(1, 4), on_node=2, contract=odd)))
    folder = make_scale(counts=(1, 2), on_node=1, reduce_s=0.0, contract=odd)
    found = json.loads((folder / "scale.json").read_text())
    (folder / "scale.json").write_text(json.dumps({**found, "links": []}))
    with pytest.raises(RecordError, match=r"--model resnet:depth=8 --nodes 2\)"):
        make_here(read_measured(folder))


def plan_of(folder: Path) -> Plan:
    return make_plan(Request(record=str(folder), cluster="here"))
