"""Where a worker's step time goes: input, compute, exposed communication, waiting for slower workers, the optimizer, the rest.

The step tells the clock which stage it enters, and the clock stamps it. So stages add up to the step. On a CPU a stamp is the
time. On a GPU it is an event in the worker's stream: it counts what the GPU waited for, not what its host did ahead of it. In a
CUDA graph it is an event that every replay records again.

DDP averages within the backward pass. Communication is exposed from the moment this worker's last gradient is ready; a hook on
the last parameter tells when. An all-reduce cannot start before the slowest worker is there. So the time up to the slowest
worker's last gradient is waiting, and only the rest is communication. For that, all stamps must be on one clock. The stamps of
one machine are; others are aligned by leaving barriers together, accurate to about the travel time of a message.
"""

import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.dist.world import World
from paceline.records import COMPONENTS

COUNTS_AS = {
    "data": "input",
    "forward": "forward",
    "backward": "backward",
    "reduce": "exposed",
    "update": "optimizer",
    "other": "other",
}
"""The stages that a step enters, and what the time in each counts as."""

_KEPT = 1000  # timed steps kept between two looks; older ones are dropped
_ROUNDS = 21  # barriers to align clocks with


@dataclass
class Timed:
    """One step of this worker. Stamps are seconds after `Clock.take`; before that, on a GPU, events."""

    step: int
    laps: list[tuple[str, Any]] = field(default_factory=list)
    """(stage, when it was entered), in order."""
    ready: Any = None
    """When the last gradient was ready."""
    buckets: list[dict[str, Any]] = field(default_factory=list)
    """DDP's buckets, in order: bytes, parameters, when ready and, if followed, when averaged."""
    end: Any = None

    def spans(self) -> list[tuple[str, float, float]]:
        """(stage, begin, end), in order."""
        ends = [stamp for _, stamp in self.laps[1:]] + [self.end]
        return [(stage, begin, end) for (stage, begin), end in zip(self.laps, ends, strict=True)]

    def gathered(self) -> float | None:
        """When this worker had all its gradients: in the backward pass that DDP averages in, or at the start of an exact sum.
        None on a single worker.
        """
        passes = [(begin, end) for stage, begin, end in self.spans() if stage == "backward"]
        if self.ready is not None and passes and passes[-1][0] <= self.ready <= passes[-1][1]:
            return float(self.ready)
        return next((begin for stage, begin, _ in self.spans() if stage == "reduce"), None)


class Clock:
    """Times the steps of one worker."""

    def __init__(self, world: World, last: nn.Parameter | None = None, detailed: bool = False) -> None:
        """`last`: the parameter whose gradient comes last, if DDP averages. After it, averaging is no longer hidden.

        In a CUDA graph every stamp costs each replay about 4 us. So unless `detailed`, a graph has only the stamps that
        separate communication from the rest, and on one worker none: forward, backward and optimizer then count as compute.
        """
        self._gpu = world.device.type == "cuda"
        self._on = not self._gpu
        """On a CPU a stamp costs 0.2 us, so every step is timed; on a GPU only steps that are about to be looked at."""
        self.follows_buckets = False
        """Also stamp each bucket's end (`--profile`): one callback per bucket."""
        self._now: Timed | None = None
        self._done: deque[Timed] = deque(maxlen=_KEPT)
        self._recorded: Timed | None = None
        self._recorded_stages = tuple(COUNTS_AS) if detailed else ("update",) if world.size > 1 else ()
        self.before_replay = "other" if detailed else "backward"
        """The stage that a replay starts with, up to the graph's first stamp."""
        self._world, self._offset_s = world, 0.0
        self._aligned = world.size == 1
        if last is not None:
            last.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def switch(self, on: bool) -> None:
        """Time the steps from the next one on, or stop timing."""
        self._on = on

    def follow_buckets(self, on: bool) -> None:
        """Also time each bucket of the steps from the next one on, or stop doing so."""
        self.follows_buckets = on
        self._on |= on

    def begin(self, step: int) -> None:
        """A step begins, and the one before it ends."""
        if self._now is None and not self._on:
            return
        now = self._stamp()
        self._close(now)
        if self._on:
            self._now = Timed(step, [("other", now)])

    def enter(self, stage: str) -> None:
        """What comes next belongs to this stage."""
        if self._gpu and torch.cuda.is_current_stream_capturing():
            self._recorded = self._recorded or Timed(-1)
            if stage in self._recorded_stages:
                self._recorded.laps.append((stage, self._stamp(recorded=True)))
        elif self._now is not None:
            self._now.laps.append((stage, self._stamp()))

    def end(self) -> None:
        """No step is under way."""
        if self._now is not None:
            self._close(self._stamp())

    def take_recorded(self) -> Timed | None:
        """The stamps that became part of a graph since the last call."""
        recorded, self._recorded = self._recorded, None
        return recorded

    def replayed(self, recorded: Timed | None) -> None:
        """The graph with these stamps was replayed: they belong to this step, and are valid until the next replay."""
        if self._now is not None and recorded is not None:
            self._now.laps += recorded.laps
            self._now.ready = recorded.ready
            self.enter("other")

    def average(
        self, bucket: Any, averaging: Callable[[], torch.futures.Future[Tensor]], compared: bool = False
    ) -> torch.futures.Future[Tensor]:
        """DDP has a bucket ready: stamp that, and start averaging it. Returns what DDP waits for.

        `compared`: this worker has just read the gradients for the noise scale, so they count as ready only now.
        """
        timed = self._now
        if compared and timed is not None and timed.ready is not None:
            timed.ready = self._stamp()
        if timed is None:
            return averaging()
        row = {"bytes": bucket.buffer().nbytes, "parameters": bucket.parameters(), "ready": self._stamp()}
        timed.buckets.append(row)
        if not self.follows_buckets:
            return averaging()

        def averaged(done: torch.futures.Future[Tensor]) -> Tensor:
            row["averaged"] = self._stamp()
            return done.value()

        return averaging().then(averaged)

    def apart(self) -> None:
        """This step's backward passes averaged nothing, so other workers do not wait for their last gradient."""
        if self._now is not None:
            self._now.ready = None

    def take(self) -> list[Timed]:
        """The steps timed since the last call, in seconds on a clock that all workers share. Waits for the GPU.

        Collective: call on every rank.
        """
        if not self._aligned:
            self._offset_s, self._aligned = _offset_s(self._world), True
        done, self._done = list(self._done), deque(maxlen=_KEPT)
        read = self._reader() if done else float
        for timed in done:
            timed.laps = [(stage, read(stamp)) for stage, stamp in timed.laps]
            timed.end = read(timed.end)
            timed.ready = None if timed.ready is None else read(timed.ready)
            for row in timed.buckets:
                row |= {name: read(row[name]) for name in ("ready", "averaged") if name in row}
        return done

    def _close(self, now: Any) -> None:
        if self._now is not None:
            self._now.end = now
            self._done.append(self._now)
            self._now = None

    def _stamp(self, recorded: bool = False) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=recorded)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _reader(self) -> Callable[[Any], float]:
        """From a stamp to seconds on the shared clock."""
        if not self._gpu:
            return lambda stamp: stamp - self._offset_s
        base = self._stamp()
        base.synchronize()
        now = time.perf_counter() - self._offset_s
        return lambda event: now - event.elapsed_time(base) / 1e3

    def _ready(self, _: Tensor) -> None:
        """The last gradient is ready."""
        if self._gpu and torch.cuda.is_current_stream_capturing():
            if self._recorded is not None and self._recorded_stages:
                self._recorded.ready = self._stamp(recorded=True)
        elif self._now is not None:
            self._now.ready = self._stamp()


@dataclass(frozen=True)
class Split:
    """The times of all workers' steps, by component."""

    step_s: np.ndarray
    """Mean step, by worker."""
    components_s: np.ndarray
    """Mean time of each of COMPONENTS, by worker; rows add up to `step_s`."""
    forward_s: float
    backward_s: float
    compute_spread_s: float
    """Standard deviation of a worker's compute over its steps. Like the two above, a mean over the workers that have parts."""
    memory_bytes: np.ndarray
    core_wait: np.ndarray
    """The given `core_wait` of each worker."""
    steps: int

    def means(self) -> dict[str, float]:
        """Each component, mean over the workers that have parts: one without any waits for them."""
        busy = self.components_s[_busy(self.components_s)]
        return {name: float(value) for name, value in zip(COMPONENTS, busy.mean(0), strict=True)}

    def slowest(self) -> tuple[int | None, float]:
        """The slowest worker, and how much longer than it the median worker waits."""
        waiting = self.components_s[:, COMPONENTS.index("waiting")]
        if len(waiting) == 1:
            return None, 0.0
        rank = int(waiting.argmin())
        return rank, float(np.median(np.delete(waiting, rank)) - waiting[rank])


def split_steps(timed: Sequence[Timed], world: World, core_wait: float = 0.0) -> Split:
    """Each worker's timed steps by component. Collective: call on every rank, with the same steps.

    `core_wait`: the share of this worker's time that its threads waited for a core.
    """
    rows = np.array([_own_components(step) for step in timed], dtype=np.float64)
    own = dict(zip(("input", "forward", "backward", "exposed", "optimizer", "other", "ready"), rows.T, strict=True))
    latest = own["ready"]
    if world.size > 1:
        shared = torch.from_numpy(latest.copy()).to(world.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        latest = shared.cpu().numpy()
    waiting = np.clip(latest - own["ready"], 0.0, own["exposed"])
    compute = own["forward"] + own["backward"]
    components = [own["input"], compute, own["exposed"] - waiting, waiting, own["optimizer"], own["other"]]
    means = [float(component.mean()) for component in components]
    mine = [*means, own["forward"].mean(), own["backward"].mean(), compute.std(), _memory_bytes(world), core_wait]
    table = torch.zeros(world.size, len(mine), dtype=torch.float64, device=world.device)
    table[world.rank] = torch.tensor(mine, dtype=torch.float64, device=world.device)
    if world.size > 1:
        dist.all_reduce(table)  # each row comes from one worker, so the sum is a gather
    found = table.cpu().numpy()
    busy = found[_busy(found)]
    return Split(
        step_s=found[:, : len(COMPONENTS)].sum(1),
        components_s=found[:, : len(COMPONENTS)],
        forward_s=float(busy[:, 6].mean()),
        backward_s=float(busy[:, 7].mean()),
        compute_spread_s=float(busy[:, 8].mean()),
        memory_bytes=found[:, 9],
        core_wait=found[:, 10],
        steps=len(timed),
    )


def _busy(components_s: np.ndarray) -> np.ndarray:
    """Which workers have parts, from their rows of components. Phases of a batch schedule can have fewer parts than workers."""
    computes = components_s[:, COMPONENTS.index("compute")] > 0
    return computes if computes.any() else ~computes


def fill_up(components_s: Mapping[str, float], step_s: float) -> dict[str, float]:
    """Fit components of some steps to a step of `step_s`: what is missing is other, and an excess is scaled down."""
    known = sum(value for name, value in components_s.items() if name != "other")
    factor = min(1.0, step_s / known) if known else 1.0
    scaled = {name: value * factor for name, value in components_s.items()}
    return {**scaled, "other": max(0.0, step_s - known * factor)}


def _own_components(timed: Timed) -> list[float]:
    """Times of input, forward, backward, exposed, optimizer and other, and when the last gradient was ready."""
    sums = dict.fromkeys(COUNTS_AS.values(), 0.0)
    ready = timed.gathered()
    for stage, begin, end in timed.spans():
        sums[COUNTS_AS[stage]] += end - begin
        if stage == "backward" and ready is not None and begin <= ready < end:
            sums["backward"] -= end - ready
            sums["exposed"] += end - ready
    return [*(sums[name] for name in ("input", "forward", "backward", "exposed", "optimizer", "other")), ready or 0.0]


def _memory_bytes(world: World) -> float:
    """The peak memory of this worker: on its GPU, or in main memory."""
    if world.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(world.device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _offset_s(world: World) -> float:
    """How far this worker's clock is ahead of rank 0's: 0 on one machine. Collective: call on every rank."""
    ids = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    ids[world.rank] = _machine(world.rank)
    dist.all_reduce(ids)
    if bool((ids == ids[0]).all()):
        return 0.0
    stamps = torch.zeros(world.size, _ROUNDS, dtype=torch.float64, device=world.device)
    for i in range(_ROUNDS):
        world.barrier()
        stamps[world.rank, i] = time.perf_counter()
    dist.all_reduce(stamps)
    return float((stamps[world.rank] - stamps[0]).median())


def _machine(rank: int) -> int:
    """A number shared by the workers of one machine; if the system has none, a number of this worker alone."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return int(boot.read_text().replace("-", "")[:15], 16) if boot.exists() else rank
