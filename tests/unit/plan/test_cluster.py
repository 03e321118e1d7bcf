from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.plan.cluster import find_cluster, list_presets, presets, read_cluster

GOOD = """
name = "mine"
workers_per_node = 4
intra = {latency_us = 2, bandwidth_GBps = 20}
inter = {latency_us = 30, bandwidth_GBps = 1.25, efficiency = {typical = 0.8, low = 0.5, high = 0.9}}
efficiency = 0.7
price = {per_worker_hour = 2.5, currency = "EUR"}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_parses_and_names_its_sources(name: str) -> None:
    cluster = find_cluster(name)
    assert cluster.name == name
    assert cluster.about
    assert "https://" in cluster.source
    assert "20" in cluster.source  # a date
    for wire in (cluster.intra, cluster.inter):
        if wire is not None:
            assert 0 < wire.bytes_per_s.low <= wire.bytes_per_s.typical <= wire.bytes_per_s.high
    if cluster.price is not None:
        assert "https://" in cluster.price.source
        assert cluster.price.date
    assert name in list_presets()


def test_a_users_own_file(tmp_path: Path) -> None:
    cluster = find_cluster(str(write(tmp_path, GOOD)))
    assert cluster.intra is not None
    assert cluster.inter is not None
    assert cluster.price is not None
    assert cluster.intra.bytes_per_s.typical == pytest.approx(14e9)
    assert cluster.intra.latency_s.typical == pytest.approx(2e-6)
    assert cluster.inter.bytes_per_s.low == pytest.approx(0.625e9)
    assert (cluster.price.per_worker_hour, cluster.price.currency) == (2.5, "EUR")
    assert cluster.most_workers() is None


def test_a_single_node_limits_the_workers(tmp_path: Path) -> None:
    assert find_cluster("h200-node").most_workers() == 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("intra =", "intrra ="), "unknown key 'intrra': did you mean 'intra'?"),
        (("latency_us = 2,", "latency = 2,"), "intra: unknown key 'latency': did you mean 'latency_us'?"),
        (("latency_us = 2, ", ""), "intra has no latency_us: add it"),
        (('name = "mine"', ""), "has no name: add it"),
        (('name = "mine"', "name = 3"), "name is 3: it must be text"),
        (("workers_per_node = 4", "workers_per_node = 0"), "workers_per_node is 0: it must be a whole number above 0"),
        (("workers_per_node = 4", "workers_per_node = 2.5"), "workers_per_node is 2.5: it must be a whole number above 0"),
        (("workers_per_node = 4", "workers_per_node = 4\ntrees = 1"), "trees is 1: it must be true or false"),
        (("low = 0.5", "low = 0.85"), "it must be low <= typical <= high"),
        (("efficiency = 0.7", "efficiency = 70"), "efficiency is 70: it is a share of the line rate and must be at most 1.5"),
        (("high = 0.9", "high = 90"), "efficiency is 90: it is a share of the line rate"),
        (("bandwidth_GBps = 20", "bandwidth_GBps = inf"), "bandwidth_GBps is inf: it must be a number above 0"),
        (("bandwidth_GBps = 20", 'bandwidth_GBps = "fast"'), "bandwidth_GBps is 'fast': it must be a number above 0"),
        (("per_worker_hour", "per_hour"), "price: unknown key 'per_hour': did you mean 'per_worker_hour'?"),
        (("intra = {latency_us = 2, bandwidth_GBps = 20}", ""), "has no intra, the link within a node"),
        (("intra = {latency_us = 2, bandwidth_GBps = 20}", "intra = 5"), "intra is 5: it must be a table"),
        (("name = ", "name == "), "is not valid TOML"),
        (('name = "mine"', 'name = ""'), "name is '': it must be one line of text"),
        (('name = "mine"', 'name = "a\\nb"'), "name is 'a\\nb': it must be one line of text"),
        (("efficiency = 0.7", 'efficiency = "high"'), "efficiency is 'high': it must be a number such as 0.8, or a table"),
        (('currency = "EUR"', "currency = 5"), "price: currency is 5: it must be text in quotes"),
        (("latency_us = 2,", "latency_us = 1e-4,"), "intra: latency_us is 0.0001: it must be 0.001 to 1e+09"),
        (("latency_us = 30", "latency_us = 1e10"), "inter: latency_us is 10000000000.0: it must be 0.001 to 1e+09"),
        (("bandwidth_GBps = 20", "bandwidth_GBps = 1e7"), "bandwidth_GBps is 10000000.0: it must be 1e-06 to 1e+06"),
        (("bandwidth_GBps = 20", "bandwidth_GBps = 1e-300"), "bandwidth_GBps is 1e-300: it must be 1e-06 to 1e+06"),
        (("workers_per_node = 4", "workers_per_node = 1000001"), "workers_per_node is 1000001: it must be 1 to 1e+06"),
        (("workers_per_node = 4", "workers_per_node = 4\ncores_per_node = 1000001"), "cores_per_node is 1000001: it must be 1"),
        (("per_worker_hour = 2.5", "per_worker_hour = 1e10"), "per_worker_hour is 10000000000.0: it must be at most 1e+09"),
        (("typical = 0.8, low = 0.5", "typical = 0.8, low = 1e-300"), "low is 1e-300: it must be 1e-06 to"),
        (("latency_us = 2,", f"latency_us = {'9' * 400},"), "999...: it must be 0.001 to 1e+09"),
        (("workers_per_node = 4", f"workers_per_node = {'9' * 400}"), "999...: it must be 1 to 1e+06"),
        (("workers_per_node = 4", f"workers_per_node = {'9' * 5000}"), "is not valid TOML: a number is too long"),
        (('name = "mine"', f"name = {'[' * 100_000}"), "is not valid TOML: its values are nested too deeply"),
        (("workers_per_node = 4", f"workers_per_node = 0x{'f' * 5000}"), "a number with thousands of digits: it must be 1 to"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_cluster(write(tmp_path, GOOD.replace(*change)))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'dgx-h100'"):
        find_cluster("dgx-h10")
    with pytest.raises(UsageError, match="cannot read cluster"):
        find_cluster("nowhere/mine.toml")


@pytest.mark.parametrize("name", ["", " "])
def test_no_name_is_one_line(name: str) -> None:
    with pytest.raises(UsageError, match=r"--cluster is empty: give a preset, .* \(--cluster list shows"):
        find_cluster(name)


def test_a_presets_name_always_means_the_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "aws-p5").write_text("")
    (tmp_path / "mine").write_text(GOOD)
    assert find_cluster("aws-p5").name == "aws-p5"
    assert find_cluster("mine").name == "mine"
    with pytest.raises(UsageError, match="has no name"):
        find_cluster("./aws-p5")
