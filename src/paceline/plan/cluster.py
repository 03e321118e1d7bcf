"""A cluster for `paceline plan`: nodes, workers per node, two links and a price, from TOML or measured on this machine.

    name = "example"                     # its name in tables
    about = "8 GPUs per node, 400 Gb/s"  # one line
    source = "https://... (date)"        # where the numbers come from
    unverified = "..."                   # which numbers are remembered or guessed, if any
    workers_per_node = 8
    gpu = "H100"                         # a worker's GPU; "any" if the file is for any GPU; leave it out for CPU workers
    cores_per_node = 96                  # CPU workers only: more workers than cores slow each other down
    link_cores = 96                      # cores that carry `intra`, if it is the node's memory (gloo on one node)
    trees = true                         # all-reduces between nodes may use trees (NCCL); false: only rings (gloo)
    intra = {latency_us = 1.9, bandwidth_GBps = 450, efficiency = {typical = 0.8, low = 0.7, high = 1.0}}
    inter = {latency_us = 8.5, bandwidth_GBps = 400}      # of a whole node, one direction
    efficiency = {typical = 0.8, low = 0.6, high = 0.95}  # share of the line rate that all-reduces reach
    price = {per_worker_hour = 6.88, currency = "USD", source = "https://...", date = "2026-11-09"}

Bandwidths are for one direction, in gigabytes (1e9) per second: a GPU with "900 GB/s NVLink" sends 450. With one worker per
node, `intra` is not needed; with a single node, `inter` is not. Latencies are taken to be right within a factor of `LOOSE`.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UsageError, unknown
from paceline.plan.fields import short
from paceline.plan.links import Fit
from paceline.toml import read_toml

LOOSE = 1.5
"""A latency is assumed to be right within this factor in both directions."""

HERE = "here"
"""The name of the machine a record was measured on."""

ENDLESS = 1 << 30
"""Workers per node if all workers are on one node, whatever their number."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """A number and its range."""

    typical: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Wire:
    """One kind of link, with its uncertainty."""

    latency_s: Range
    bytes_per_s: Range
    level: float = 0.0
    """The uncertainty of a fit's overall level: its residual divided by the root of its number of timings; 0: not fitted."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a worker costs per hour."""

    per_worker_hour: float
    currency: str = "USD"
    source: str = ""
    date: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where the workers would run."""

    name: str
    about: str = ""
    source: str = ""
    unverified: str = ""
    workers_per_node: int
    gpu: str = ""
    """A worker's GPU, such as H100; `any`: a GPU of any kind; empty: CPU workers, or unknown."""
    cores_per_node: int | None = None
    trees: bool = True
    intra: Wire | None = None
    inter: Wire | None = None
    price: Price | None = None
    link_cores: int | None = None
    """The cores that carry the link within a node, if it is the node's memory: more workers than cores slow it down."""
    one_machine: bool = False
    """Whether all nodes are one machine and all workers share its `cores_per_node` cores (`--cores`)."""
    here: bool = False
    """Whether this is the machine of the record, so that its measurements apply directly."""
    off: float = 1.0
    """The factor by which the fitted links typically differ from the timed all-reduces."""

    def nodes(self, workers: int) -> int:
        """The number of nodes for this number of workers."""
        return math.ceil(workers / self.workers_per_node)

    def most_workers(self) -> int | None:
        """The largest possible number of workers; None: no limit. Without a network there is only one node."""
        return self.workers_per_node if self.inter is None else None


def find_cluster(name: str) -> Cluster:
    """The preset of this name, or the cluster in a TOML file. A preset's name always means the preset."""
    if not name.strip():
        raise UsageError("--cluster is empty: give a preset, a TOML file or here (--cluster list shows the presets)")
    path, packaged = Path(name), presets()
    if name in packaged or (path.name == name and not path.suffix and not path.exists()):
        if name not in packaged:
            error = unknown("cluster", name, [*packaged, HERE])
            raise UsageError(f"{error} (--cluster list shows all presets; a TOML file works, too)")
        path = packaged[name]
    return read_cluster(path)


def presets() -> dict[str, Path]:
    """The clusters shipped with Paceline, by name."""
    return {file.stem: file for file in sorted((Path(__file__).parent / "clusters").glob("*.toml"))}


def list_presets() -> str:
    """The presets as a table."""
    found = {name: read_cluster(path) for name, path in presets().items()}
    width = max(len(name) for name in [*found, HERE])
    lines = [f"{name:<{width}}  {cluster.about}" for name, cluster in found.items()]
    return "\n".join([*lines, f"{HERE:<{width}}  the machine the record was measured on (needs a record of paceline scale)"])


def read_cluster(path: Path) -> Cluster:
    """Read a cluster from TOML; a one-line UsageError if something is wrong."""
    what = f"cluster {path.stem if path.parent.name == 'clusters' else path}"
    try:
        found = read_toml(path, what)
    except (ValueError, RecursionError):  # a number with thousands of digits, or tables nested too deeply
        raise UsageError(f"{what} is not valid TOML: a number is too long, or its tables are nested too deeply") from None
    _check_keys(found, _KEYS, what)
    for needed in ("name", "workers_per_node"):
        if needed not in found:
            raise UsageError(f"{what} has no {needed}: add it")
    workers = _number(found, "workers_per_node", what, whole=True)
    default = _range(found.get("efficiency", 1.0), f"{what}: efficiency")
    wires = {name: _wire(found[name], default, f"{what}: {name}") for name in ("intra", "inter") if name in found}
    if not wires or (workers > 1 and "intra" not in wires):
        missing = "intra, the link within a node" if workers > 1 else "inter, the network between nodes"
        raise UsageError(f"{what} has no {missing}: add its latency_us and bandwidth_GBps")
    price = found.get("price")
    return Cluster(
        name=_name(found, what),
        about=_text(found, "about", what),
        source=_text(found, "source", what),
        unverified=_text(found, "unverified", what),
        workers_per_node=int(workers),
        gpu=_text(found, "gpu", what).strip(),
        cores_per_node=_count(found, "cores_per_node", what),
        link_cores=_count(found, "link_cores", what),
        trees=_flag(found, "trees", what, default=True),
        price=None if price is None else _price(price, f"{what}: price"),
        intra=wires.get("intra"),
        inter=wires.get("inter"),
    )


def from_fit(
    intra: Fit | None, inter: Fit | None = None, *, workers_per_node: int | None = None, cores: int | None, trees: bool
) -> Cluster:
    """The machine of a record, with its fitted links.

    `workers_per_node` None: all workers are on one node. Its cores carry the link within a node.
    """
    fits = [fit for fit in (intra, inter) if fit is not None]
    timings, off = sum(fit.timings for fit in fits), math.exp(max(fit.residual for fit in fits))
    worst = max(off, *(fit.worst for fit in fits))
    return Cluster(
        name=HERE,
        about="the machine as measured",
        source=f"fitted to {timings} all-reduces in the record, typically off by a factor of {off:.2f}, at worst {worst:.2f}",
        workers_per_node=workers_per_node or ENDLESS,
        cores_per_node=cores,
        trees=trees,
        intra=None if intra is None else _fitted(intra),
        inter=None if inter is None else _fitted(inter),
        link_cores=None if intra is None else cores,
        here=True,
        off=off,
    )


def _fitted(fit: Fit) -> Wire:
    return Wire(
        latency_s=_around(fit.latency_s, fit.latency_spread),
        bytes_per_s=_around(min(fit.bytes_per_s, 1e15), fit.bandwidth_spread),
        level=fit.residual / math.sqrt(fit.timings),
    )


_KEYS = {
    *("name", "about", "source", "unverified", "workers_per_node", "gpu", "cores_per_node"),
    *("link_cores", "trees", "intra", "inter", "efficiency", "price"),
}
_MOST_EFFICIENT = 1.5  # above 1 if switches sum gradients; a percentage given by mistake is far above
_BOUNDS = {
    "latency_us": (1e-3, 1e9),
    "bandwidth_GBps": (1e-6, 1e6),
    "per_worker_hour": (0.0, 1e9),
    "workers_per_node": (1, 10**6),
    "cores_per_node": (1, 10**6),
    "link_cores": (1, 10**6),
    **dict.fromkeys(("typical", "low", "high"), (1e-6, 1e6)),
}
"""The allowed range of numbers in a file; a number outside is a mistake."""
_WIRE_KEYS = {"latency_us", "bandwidth_GBps", "efficiency"}


def _check_keys(found: Any, known: set[str], what: str) -> None:
    if not isinstance(found, Mapping):
        raise UsageError(f"{what} is {short(found)}: it must be a table with {', '.join(sorted(known))}")
    for key in found:
        if key not in known:
            raise UsageError(f"{what}: {unknown('key', key, known)}")


def _wire(found: Any, default: Range, what: str) -> Wire:
    _check_keys(found, _WIRE_KEYS, what)
    for needed in ("latency_us", "bandwidth_GBps"):
        if needed not in found:
            raise UsageError(f"{what} has no {needed}: add it")
    latency = _number(found, "latency_us", what) * 1e-6
    rate = _number(found, "bandwidth_GBps", what) * 1e9
    share = _range(found["efficiency"], f"{what}: efficiency") if "efficiency" in found else default
    return Wire(
        latency_s=Range(typical=latency, low=latency / LOOSE, high=latency * LOOSE),
        bytes_per_s=Range(typical=rate * share.typical, low=rate * share.low, high=rate * share.high),
    )


def _range(found: Any, what: str) -> Range:
    if isinstance(found, int | float):
        found = {"typical": found}
    if not isinstance(found, Mapping):
        raise UsageError(f"{what} is {short(found)}: it must be a number such as 0.8, or a table with typical, low and high")
    _check_keys(found, {"typical", "low", "high"}, what)
    if "typical" not in found:
        raise UsageError(f"{what} has no typical: add it")
    typical = _number(found, "typical", what)
    low, high = (_number(found, key, what) if key in found else typical for key in ("low", "high"))
    if not low <= typical <= high:
        raise UsageError(f"{what} is {typical:g} between {low:g} and {high:g}: it must be low <= typical <= high")
    if high > _MOST_EFFICIENT:
        raise UsageError(
            f"{what} is {high:g}: it is a share of the line rate and must be at most {_MOST_EFFICIENT:g} (0.8 for 80%)"
        )
    return Range(typical=typical, low=low, high=high)


def _price(found: Any, what: str) -> Price:
    _check_keys(found, {field.name for field in dataclasses.fields(Price)}, what)
    if "per_worker_hour" not in found:
        raise UsageError(f"{what} has no per_worker_hour: add it")
    texts = {key: str(found[key]) for key in ("source", "date") if key in found}
    if "currency" in found:
        texts["currency"] = _text(found, "currency", what)
    return Price(per_worker_hour=_number(found, "per_worker_hour", what), **texts)


def _number(found: Mapping[str, Any], key: str, what: str, *, whole: bool = False) -> float:
    value, (low, high) = found[key], _BOUNDS[key]
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 < value < math.inf:
        raise UsageError(f"{what}: {key} is {short(value)}: it must be a {'whole number' if whole else 'number'} above 0")
    if not low <= value <= high:
        raise UsageError(f"{what}: {key} is {short(value)}: it must be {f'{low:g} to' if low else 'at most'} {high:g}")
    return float(value)


def _count(found: Mapping[str, Any], key: str, what: str) -> int | None:
    return int(_number(found, key, what, whole=True)) if key in found else None


def _flag(found: Mapping[str, Any], key: str, what: str, *, default: bool) -> bool:
    value = found.get(key, default)
    if not isinstance(value, bool):
        raise UsageError(f"{what}: {key} is {short(value)}: it must be true or false")
    return value


def _text(found: Mapping[str, Any], key: str, what: str) -> str:
    value = found.get(key, "")
    if not isinstance(value, str):
        raise UsageError(f"{what}: {key} is {short(value)}: it must be text in quotes")
    return value


def _name(found: Mapping[str, Any], what: str) -> str:
    value = _text(found, "name", what).strip()
    if not value or not value.isprintable():
        raise UsageError(f"{what}: name is {short(value)}: it must be one line of text, such as mine")
    return value


def _around(value: float, spread: float) -> Range:
    """A fitted value with the 90% range of a normal distribution of this relative error; never below a tenth of the value."""
    off = min(0.9, 1.645 * spread)
    return Range(typical=value, low=value * (1 - off), high=value * (1 + off))
