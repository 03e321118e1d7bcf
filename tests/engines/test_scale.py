"""`paceline scale` as users start it: by itself, under torchrun, and on two nodes with a slow link between them."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.engines import INSTALL, PACELINE, TORCHRUN, run_together
from harness.namespaces import missing, two_nodes
from harness.processes import paceline, run

_SCALE = ("scale", "fashion-mnist-mini", "--model", "mlp:width=256", "--windows", "3", "--window-s", "0.1", "--name", "s")
_PORT = "21500"


def _read(runs: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs / "s" / "scale.json").read_text())
    return found


def test_it_measures_each_count_and_gives_advice(runs: Path) -> None:
    done = paceline(*_SCALE, "--workers", "1,2")
    assert done.returncode == 0, done.stderr
    result = _read(runs)
    one, two = result["counts"]
    assert (one["workers"], one["global_batch"], two["workers"], two["global_batch"]) == (1, 128, 2, 256)
    assert one["contract"]["devices"].startswith("1 CPU worker, 1 thread"), "as many threads as each of two has"
    assert (one["speed_up"], one["efficiency"]) == (1.0, 1.0)
    assert two["efficiency"] == pytest.approx(two["samples_per_s"] / one["samples_per_s"] / 2)
    assert one["low"] <= one["samples_per_s"] <= one["high"]
    assert len(one["windows"]) == 3
    assert one["components_s"]["communication"] == one["components_s"]["waiting"] == 0
    assert sum(bucket["bytes"] for bucket in two["buckets"]) >= two["gradient_bytes"] > 0
    assert {link["workers"] for link in result["links"]} == {2}
    assert two["reduce_s"] > 0
    assert result["verdict"] in done.stdout
    assert "of linear" in done.stdout

    done = run([*TORCHRUN, "--nproc-per-node", "3", "-m", "paceline", *_SCALE])  # goes into the same record
    assert done.returncode == 0, done.stderr
    assert [count["workers"] for count in _read(runs)["counts"]] == [1, 2, 3]

    before = _read(runs)
    done = paceline(*(each.replace("256", "64") for each in _SCALE), "--workers", "2")  # of another model
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "was measured with model mlp:width=256, but this run has mlp:width=64: choose another --name" in done.stderr
    assert _read(runs) == before
    done = run([*TORCHRUN, "--nproc-per-node", "2", "-m", "paceline", *_SCALE, "--workers", "3"])
    assert done.returncode != 0
    assert "--workers is 3, but torchrun has started 2: leave it out" in done.stderr


def test_strong_scaling_keeps_the_batch_and_the_parts(runs: Path) -> None:
    done = paceline(*_SCALE, "--workers", "1,2", "--mode", "strong")
    assert done.returncode == 0, done.stderr
    for count in _read(runs)["counts"]:
        assert (count["virtual_workers"], count["global_batch"]) == (2, 256)


@pytest.mark.netns
@pytest.mark.skipif(bool(missing()), reason=f"network namespaces need {' and '.join(missing())}: {INSTALL}, run as root")
def test_a_slow_link_shows_as_communication(runs: Path) -> None:
    """1.2 MB of gradients take 100 ms at 100 Mbit/s; a step's compute takes a few ms."""
    with two_nodes(rate="100mbit") as nodes:
        flags = ["--nodes", "2", "--workers", "1", "--rendezvous", f"{nodes[0].address}:{_PORT}"]
        commands = [node.command(*PACELINE, *_SCALE, *flags, "--node-id", str(i)) for i, node in enumerate(nodes)]
        done = run_together(*commands, timeout_s=100)
    assert [each.returncode for each in done] == [0, 0], "\n".join(each.stderr for each in done)
    result = _read(runs)
    (count,) = result["counts"]
    assert (count["workers"], count["nodes"]) == (2, 2)
    components_s = count["components_s"]
    assert max(components_s, key=lambda name: components_s[name]) == "communication"
    assert components_s["communication"] > 0.06
    assert "communication" in result["verdict"]


def test_a_step_larger_than_the_data_is_one_line(runs: Path) -> None:
    done = paceline(*_SCALE, "--workers", "1", "--reference-batch", "60000")
    assert done.returncode == 2
    assert "has no full step of 60,000" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not runs.exists()
