"""What a prediction starts from: a step as measured with each number of workers, and the run that it belongs to."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config import Config
from paceline.phases import Phase
from paceline.plan.links import Timing
from paceline.plan.tradeoff import NoiseScale


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that DDP averages in one all-reduce."""

    bytes: float
    ready: float
    """When they are ready, as a fraction of the backward pass."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A step as measured with one number of workers and, if the batch changed, in one phase."""

    workers: int
    nodes: int
    global_batch: int
    samples_per_s: float
    spread: float
    """Relative deviation of the speed from window to window."""
    components_s: Mapping[str, float]
    """The components of a step's time; they add up to global_batch / samples_per_s."""
    forward_s: float
    backward_s: float
    compute_spread_s: float
    """Deviation of one worker's compute from step to step."""
    reduce_s: float
    windows: tuple[float, ...] = ()
    """The speed in each window, or in each health row of a training run."""
    timed: float = 1.0
    """The time of a step in the steps timed one by one, relative to a step in the windows."""
    steps: float = 1.0
    """Steps that were timed: its weight beside other points."""
    slowest_samples: float | None = None
    """Samples of the worker with the most, if workers have different numbers of parts."""

    @property
    def samples(self) -> float:
        """Samples per worker and step."""
        return self.slowest_samples or self.global_batch / self.workers

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.global_batch / self.samples_per_s


@dataclass(frozen=True, kw_only=True)
class Run:
    """The training to plan for: a number of steps at a global batch."""

    steps: int
    global_batch: int
    train_samples: int | None
    """Samples per epoch, which limit the global batch; None: unknown."""
    about: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The input of a prediction."""

    record: str
    task: str
    """As given on a command line."""
    unit: str
    points: tuple[Point, ...]
    """In order of the number of workers; phases with the same workers, the largest batch first."""
    gradient_bytes: int
    buckets: tuple[Bucket, ...]
    links: tuple[Timing, ...]
    cores: int | None
    """Cores of the machine if the workers are CPU workers; None if they have GPUs."""
    threads: int
    """Threads per CPU worker."""
    backend: str
    run: Run | None
    noise: NoiseScale | None
    assumed: tuple[str, ...]
    flags: str = ""
    """The flags after TASK that train the same model (`own_flags`)."""
    device: str = ""
    """What a worker computed on: `CPU`, a GPU such as `NVIDIA H200`, or empty if the record does not say."""
    precision: str = ""
    """fp32 or bf16; empty if the record does not say."""
    phases: tuple[Phase, ...] = ()
    """The batches of the run over time, if it had a batch schedule."""
    virtual_workers: int = 1
    smallest_part: int = Config.smallest_part
    epochs: int | None = None
    """Of the run, as far as it went; None: unknown."""
    steps: int | None = None
    """Those that it did."""
    chosen: str = ""
    """Which steps count, if the run had several numbers of workers."""

    @property
    def base(self) -> Point:
        """The smallest count measured, in its phase with the largest batch."""
        return self.points[0]

    @property
    def widest(self) -> Point:
        """The largest count measured, in its phase with the largest batch."""
        return max(self.points, key=lambda point: point.workers)  # the first of them

    def fewest(self) -> tuple[Point, ...]:
        """The points with the smallest count, in order of their samples per worker."""
        found = (point for point in self.points if point.workers == self.base.workers)
        return tuple(sorted(found, key=lambda point: point.samples))

    @property
    def slots(self) -> int | None:
        """How many workers can run at the same time on the machine; None: all."""
        return None if self.cores is None else max(1, self.cores // self.threads)

    def alike(self) -> tuple[Point, ...]:
        """The points with as many samples per worker and step as the base: weak scaling."""
        return tuple(point for point in self.points if math.isclose(point.samples, self.base.samples, rel_tol=0.02))
