import json
import socket
from typing import Any

import pytest

from paceline.doctor import network as module
from paceline.doctor.finding import Finding, merge
from paceline.doctor.network import Network, judge_limits, judge_loader, judge_network, look_at_network
from paceline.doctor.probe import STAGES, Probe, read_probe

LO = {"lo": "127.0.0.1", "eth0": "10.0.0.1"}
GOOD = Probe(
    stages={
        "torch": {"start": "fork", "sharing": "file_descriptor"},
        "all-reduce": {"s": 0.2, "listening": ["127.0.0.1"]},
        "loader": {"batches_s": 0.01},
        "gpus": {"gpus": []},
    }
)


def network(probe: Probe = GOOD, env: dict[str, str] | None = None, **change: Any) -> Finding:
    return merge("network", judge_network(Network(**{"interfaces": LO, **change}), probe, env or {}))


def test_workers_that_connect() -> None:
    assert network() == Finding(
        "ok", "network", "2 workers all-reduced over gloo in 0.2 s; workers listen on the loopback only"
    )


def test_an_interface_that_does_not_exist() -> None:
    found = network(env={"GLOO_SOCKET_IFNAME": "nowhere0"})
    assert (found.level, found.fix) == ("wrong", "unset GLOO_SOCKET_IFNAME")
    assert found.text.startswith("GLOO_SOCKET_IFNAME is nowhere0, not one of lo, eth0")
    assert network(env={"GLOO_SOCKET_IFNAME": "lo"}).level == "ok"


def test_no_loopback() -> None:
    found = network(Probe(stages={"torch": {}}, failure="Unable to find address for: lo"), interfaces={"eth0": "10.0.0.1"})
    assert found == Finding("wrong", "network", "there is no loopback interface", "ip link set lo up")


def test_addresses_that_cannot_be_listened_on() -> None:
    assert network(refused=("127.0.0.1",)).level == "wrong"
    assert network(refused=("10.0.0.1",)).level == "note"


def test_a_port_that_is_in_use() -> None:
    found = network(port_taken=True)
    assert (found.level, found.fix) == ("note", "use torchrun --standalone, or paceline --workers")
    assert found.text.startswith("torchrun's port 29500 is in use")
    assert network(port_taken=True, port=7000, env={"MASTER_PORT": "7000"}).fix == "choose another MASTER_PORT"


def test_workers_that_listen_outside_the_loopback() -> None:
    stages = {**GOOD.stages, "all-reduce": {"s": 0.2, "listening": ["0.0.0.0", "127.0.0.1"]}}
    found = network(Probe(stages=stages))
    assert (found.level, found.fix) == ("note", "export GLOO_SOCKET_IFNAME=lo")
    assert "workers listen on 0.0.0.0, where other machines can connect" in found.text


def test_workers_that_do_not_connect() -> None:
    found = network(Probe(stages={"torch": {}}, failure="it did not finish within 60 s"))
    assert found.level == "wrong"
    assert found.text.startswith("2 workers could not all-reduce: it did not finish within 60 s")


def test_real_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = look_at_network({"lo": "127.0.0.1", "gone": "192.0.2.77"}, {"MASTER_PORT": str(port)})
    assert (found.port, found.port_taken, found.refused) == (port, True, ("192.0.2.77",))
    assert look_at_network({}, {"MASTER_PORT": "many"}).port == 29500


def test_loader_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_shared_bytes", lambda: 8 << 30)
    monkeypatch.setattr(module, "_open_files", lambda: 4096)
    good = Finding("ok", "loader", "2 processes (fork) start and load batches; 8.0 GiB of shared memory")
    assert merge("loader", judge_loader(GOOD)) == good
    stages = {name: GOOD.stages[name] for name in ("torch", "all-reduce")}
    bad = merge("loader", judge_loader(Probe(stages=stages, failure="RuntimeError: Bus error")))
    assert (bad.level, bad.fix) == ("wrong", "use --loader-workers 0, which reads in the worker itself")
    assert bad.text.startswith("2 processes could not load batches: RuntimeError: Bus error")
    monkeypatch.setattr(module, "_shared_bytes", lambda: 64 << 20)
    small = merge("loader", judge_loader(Probe(stages=stages, failure="it did not finish within 60 s")))
    assert (small.level, small.fix[:10]) == ("wrong", "docker run"), "the cause is what to fix"


def test_an_error_in_one_stage_does_not_hide_the_others() -> None:
    said = [{"stage": stage} if stage != "loader" else {"stage": stage, "error": "OSError: no space"} for stage in STAGES]
    probe = read_probe("\n".join(map(json.dumps, said)), "it was killed")
    assert (probe.why("loader"), probe.failure, list(probe.stages)) == (
        "OSError: no space",
        "",
        ["torch", "all-reduce", "gpus"],
    )
    assert merge("loader", judge_loader(probe)).level == "wrong"


def test_limits_of_a_container() -> None:
    (small,) = judge_limits(64 << 20, None)
    assert (small.level, small.text) == ("note", "/dev/shm has only 64 MiB free, too little for large batches")
    assert [each.fix for each in judge_limits(None, 256)] == ["ulimit -n 4096"]
    assert list(judge_limits(None, None)) == []


def test_the_output_of_a_probe_that_ended_early() -> None:
    said = "a library's banner\n[1]\n" + json.dumps({"stage": "torch", "version": "2.11.0"}) + '\n{"stage": "all-re'
    probe = read_probe(said, "it was killed by SIGSEGV")
    assert list(probe.stages) == ["torch"]
    assert probe.why("all-reduce") == "it was killed by SIGSEGV"
    assert probe.why("loader") == "not tried, because the check of all-reduce failed"
    assert merge("loader", judge_loader(probe)).level == "note", "only what failed is wrong"
    assert network(probe).level == "wrong"
    dead = Probe(failure="no module named torch")
    assert network(dead).text.startswith("not tried, because the check of torch failed")
    whole = "\n".join(json.dumps({"stage": stage}) for stage in STAGES)
    assert read_probe(whole, "rank 1 was killed").failure == ""
