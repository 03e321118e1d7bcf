"""What `paceline plan` is asked: its flags, checked, and the record, cluster and numbers of workers that they name."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.errors import UsageError
from paceline.output import plural
from paceline.plan.cluster import ENDLESS, HERE, Cluster, find_cluster
from paceline.plan.fields import short
from paceline.plan.here import make_here
from paceline.plan.measured import read_measured
from paceline.plan.model import Mode, Model
from paceline.plan.points import Measured
from paceline.plan.target import counts_up_to, place_limit
from paceline.plan.words import list_words
from paceline.records import find_record

MOST_ASKED = 1_000_000
"""The largest --workers."""

_BOUNDS = {
    "speed": (1e-6, 1e6),
    "price": (0.0, 1e9),
    "target-steps": (0, 10**12),
    "samples": (0, 10**9),
    "virtual-workers": (0, 10**6),
    "smallest-part": (0, 10**9),
    "epochs": (0, 10**5),
    "train-samples": (0, 10**10),
}
"""The range of number flags: above the first (or from it, if it is not 0), up to the second."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asks for; the fields are flags."""

    record: str = ""
    """A record's folder, or its name in runs_dir."""
    cluster: str
    """A preset's name, a TOML file, `here` or `list`."""
    mode: Mode = "weak"
    workers: str = ""
    """Counts such as 1,2,8; empty: 1, 2, 4, ... up to 4096, or to what the cluster has room for (`here`: 64)."""
    target_steps: int | None = None
    """Steps to the target at the record's global batch, instead of the steps of its run."""
    noise: str = ""
    """A noise scale in samples, or a record that measured it."""
    price: float | None = None
    samples: int | None = None
    """Samples per worker and step in weak scaling; None: as measured."""
    speed: float = 1.0
    """How many times as fast a worker is there as the measured one."""
    cores: str = ""
    """Cores that all CPU workers share, on any number of nodes; `none`: each has its own device; empty: as measured."""
    batch_schedule: str = ""
    """Epoch:batch pairs; empty: the record's own, if it has one; `none`: a constant batch."""
    virtual_workers: int | None = None
    smallest_part: int | None = None
    epochs: int | None = None
    train_samples: int | None = None
    against: str = ""
    """A record to compare the time with."""
    links: str = ""
    """A record of `paceline scale` for `--cluster here`, if the record timed no all-reduces itself."""
    json: str = ""
    runs_dir: str = "runs"

    def __post_init__(self) -> None:
        if self.mode not in ("weak", "strong"):
            raise UsageError(
                f"--mode is {self.mode!r}: it must be weak (fixed samples per worker) or strong (fixed global batch)"
            )
        check_number("speed", self.speed)
        for name in ("price", "target_steps", "samples", "virtual_workers", "smallest_part", "epochs", "train_samples"):
            check_number(name.replace("_", "-"), getattr(self, name))
        if self.samples is not None and self.mode == "strong":
            raise UsageError(
                f"--samples is {self.samples:,}, but --mode strong divides the record's global batch: leave --samples out,"
                " or use --mode weak"
            )
        if self.cores not in ("", "none") and not (
            self.cores.isascii() and self.cores.isdigit() and 0 < int(self.cores[:9]) < 10**6
        ):
            raise UsageError(f"--cores is {self.cores!r}: it must be a number of cores above 0, or none")


def check_number(name: str, value: float | None) -> None:
    """A UsageError for a flag's number that makes no sense."""
    low, high = _BOUNDS[name]
    if value is None or (value > 0 and low <= value <= high):
        return
    said = short(value) if isinstance(value, int) and abs(value) > 10**15 else f"{value:g}"
    if not 0 < value < math.inf:
        raise UsageError(f"--{name} is {said}: it must be a number above 0")
    raise UsageError(f"--{name} is {said}: it must be {f'{low:g} to' if low else 'at most'} {high:g}")


def read_request(request: Request) -> Measured:
    """The record that is asked about, with the links of another one if `--links` names it."""
    measured = read_measured(find_record(request.record, request.runs_dir))
    if not request.links:
        return measured
    timed = read_measured(find_record(request.links, request.runs_dir))
    if not timed.links:
        raise UsageError(
            f"--links {request.links} timed no all-reduces: give a record of paceline scale {measured.task}{measured.flags}"
            " --workers 1,2"
        )
    together = tuple(point for point in timed.points if point.workers > measured.widest.workers)
    return replace(measured, links=timed.links, buckets=timed.buckets, points=(*measured.points, *together))


def asks_schedule(request: Request, measured: Measured) -> bool:
    """Whether the request is about a run whose batch changes. A UsageError for flags that do not go together."""
    given = {
        "--virtual-workers": request.virtual_workers,
        "--smallest-part": request.smallest_part,
        "--epochs": request.epochs,
        "--train-samples": request.train_samples,
        "--against": request.against,
    }
    constant = {
        "--mode strong": request.mode == "strong",
        "--samples": request.samples,
        "--target-steps": request.target_steps,
        "--noise": request.noise,
    }
    if request.batch_schedule in ("", "none") and (request.batch_schedule or len(measured.phases) < 2):
        wrong = next((name for name, value in given.items() if value), None)
        if wrong:
            raise UsageError(f'{wrong} is for a batch schedule: also give --batch-schedule "0:BATCH ...", or leave it out')
        return False
    wrong = next((name for name, value in constant.items() if value), None)
    if wrong:
        raise UsageError(
            f"{wrong} is for a constant batch, but this prediction is for a batch schedule: leave it out, or give"
            " --batch-schedule none"
        )
    return True


def make_cluster(name: str, measured: Measured, cores: str = "") -> tuple[Measured, Cluster]:
    """The record and the cluster of this name, with `cores` applied; `here` is made from the record's own all-reduces.

    Also with `none`, the machine's cores carry the link within a node.
    """
    if cores not in ("", "none"):
        if measured.cores is None:
            raise UsageError(
                f"--cores is {cores}, but the workers of {measured.record} have GPUs and share no cores: leave it out"
            )
        if name == HERE:
            measured = replace(measured, cores=int(cores))
    cluster = make_here(measured) if name == HERE else find_cluster(name)
    if cores == "none":
        return replace(measured, cores=None), replace(cluster, cores_per_node=None)
    return measured, replace(cluster, cores_per_node=int(cores), one_machine=True) if cores else cluster


def parse_counts(text: str, model: Model, batch: int | None = None) -> list[int]:
    """`--workers 1,2,8` as numbers; if it is empty, all doublings and the most the cluster has room for.

    `batch`: the fixed global batch of strong scaling, which limits them; None: as measured.
    """
    if not text:
        return counts_up_to(place_limit(model))
    try:
        counts = sorted({int(each) for each in text.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise UsageError(f"--workers is {short(text)}: it must be counts above 0, such as 1,2,8")
    if counts[-1] > MOST_ASKED:
        raise UsageError(f"--workers asks for more than {MOST_ASKED:,}, the largest count that can be predicted: ask for fewer")
    limit = model.cluster.most_workers()
    if limit and counts[-1] > limit:
        raise UsageError(
            f"--workers asks for {counts[-1]}: {model.cluster.name} is a single node of {limit}; choose a cluster with a"
            " network (--cluster list), or give it an inter link"
        )
    batch = batch or model.measured.base.global_batch
    if model.mode == "strong" and counts[-1] > batch:
        raise UsageError(f"--workers asks for {counts[-1]}: a fixed global batch of {batch} allows at most {batch}")
    return counts


def introduce_record(
    model: Model, warnings: Sequence[str], request: Request, scaling: str = "", more: Sequence[str] = ()
) -> list[str]:
    """The lines that say what a prediction is based on, and what it assumes."""
    measured, cluster = model.measured, model.cluster
    counts = list_words([f"{workers:,}" for workers in dict.fromkeys(point.workers for point in measured.points)])
    counts += " worker" if counts == "1" else " workers"
    samples = list_words([f"{round(each):,}" for each in dict.fromkeys(point.samples for point in measured.fewest())])
    about = f"{cluster.name}, {cluster.about}" if cluster.about else cluster.name
    lines = [
        f"measured: {measured.task} with {counts}, {samples} {measured.unit} per worker and step,"
        f" {measured.gradient_bytes:,} bytes of gradients in {plural(len(measured.buckets), 'bucket')} ({measured.record})",
        f"cluster: {about}{'; ' + cluster.source if cluster.here else ''}",
    ]
    lines += [f"warning: {each}" for each in warnings]
    if cluster.unverified or not (cluster.source or cluster.here):
        lines.append(f"unverified: {cluster.unverified or 'all numbers: the file names no source'}")
    speed = "as fast as" if request.speed == 1 else f"{request.speed:g} times as fast as"
    lines.append(f"assumed: {scaling}a worker there is {speed} the measured one (--speed)")
    cores = []
    if request.cores == "none":
        cores.append("each worker has its own device and shares no cores (--cores)")
    elif request.cores:
        cores.append(f"all workers share {plural(int(request.cores), 'core')}, on any number of nodes (--cores)")
    return [*lines, *(f"assumed: {each}" for each in (*measured.assumed, *more, *cores))]


def as_json_base(request: Request, model: Model) -> dict[str, Any]:
    """What a prediction is based on, as a JSON-able dict."""
    return {
        "kind": "plan",
        "request": asdict(request),
        "task": model.measured.task,
        "unit": model.measured.unit,
        "measured": asdict(model.measured),
        "cluster": _cluster_json(model.cluster),
        "interference": None if model.interference is None else float(model.interference[0]),
    }


def _cluster_json(cluster: Cluster) -> dict[str, Any]:
    """The cluster; `workers_per_node` is null if a node has room for any number."""
    places = None if cluster.workers_per_node >= ENDLESS else cluster.workers_per_node
    return {**asdict(cluster), "workers_per_node": places}
