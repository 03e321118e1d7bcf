"""The fast step on a GPU: batch, forward, backward, all-reduce and optimizer recorded once as a CUDA graph and replayed with
one launch, compiled by torch.compile where that pays off.

A small net's step is some three hundred kernels of a few microseconds: launched one by one from Python, the GPU waits for its
host most of the time. A graph has no host in it, so nothing of the host's may matter: what differs from step to step (sample
numbers, the epoch's key, the learning rate, wishes) lies in tensors that are filled before each replay, and the seed of the
GPU's random numbers is read by every replay anew. An epoch's full steps share a graph; its last one or two, which are
smaller, have their own.

Before the first step the plain step is run, watched for what a graph cannot repeat, captured, and both are compared; then all
weights are put back. Whatever does not fit is said in one line, and the plain step trains.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.core.parts import Pass
from paceline.data.loaders import Inputs
from paceline.dist.agree import any_reason
from paceline.errors import PacelineError
from paceline.training.build import Run
from paceline.training.capture.graph import Body, Graph, compiler, first_line, watch
from paceline.training.step import Captured, Loss, Step

COMPILE_PAYS_S = 180.0
"""In auto, compile where this much training is left: it takes about 20 s the first time and saves 15 to 25%."""
TUNING_PAYS = 10_000
"""In auto, steps from which on cuDNN may try its algorithms: 2 to 5 s, for 4% of a large batch's time."""
_TAILS_PAY = 3  # epochs
_TIMED = 10


def prepare(run: Run, at: int) -> None:
    """Capture the steps of a run that goes on at step `at`, or say why not; weights stay. Every worker reaches this."""
    config, world, step = run.config, run.world, run.step
    left = _steps_left(step, at)
    if config.fast == "off" or world.device.type != "cuda" or left <= 0:
        return
    begin = time.monotonic()
    pays = config.fast == "on" or left >= TUNING_PAYS
    with _tuned(torch.backends.cudnn.benchmark or (config.reduce == "fast" and pays)):
        how = _Trials(run, at).attempt()
    step.statistics.rest()
    if step.captured is None:
        step.say(f"the step is not captured as a CUDA graph, and runs as it is: {how}")
    else:
        step.say(f"the step is captured as a CUDA graph{how}, in {time.monotonic() - begin:.1f} s")


@dataclass(frozen=True)
class _Case:
    """One step of an epoch, with inputs to try it on."""

    passes: list[Pass]
    inputs: list[Inputs]
    samples: int
    seed: Callable[[], None]
    """As the loop would, before the first pass."""


class _Trials:
    """The attempt to capture a run's steps: what its stages share."""

    def __init__(self, run: Run, at: int) -> None:
        self.run, self.step, self.at = run, run.step, at
        self.epoch = at // run.sampler.steps
        self.kept: _Kept | None = None

    def attempt(self) -> str:
        """Set the step's `captured`, and say how; or say why not."""
        try:
            return self._attempt()
        except PacelineError:
            raise
        except Exception as error:
            if self.run.world.size > 1:  # the others may be in a collective
                raise
            # Nothing in here is worth a run: what is the user's own mistake shows again in the first step.
            self.step.captured, self.step.compiled = None, False
            self._put_back()
            return f"{type(error).__name__}: {first_line(error)}"

    def _attempt(self) -> str:
        run, step, config = self.run, self.step, self.run.config
        why = _why_never(run)
        if why:
            return why
        step.model.train()
        step.begin(self.at)
        full = self._case(0)
        self.kept = _Kept(step)
        for _ in range(_warm_ups(run)):
            before = self._plain(full)
        why = any_reason(run.world, self._two_seeds(full))  # before anything else that only some workers might do
        if why:
            return why
        expected, why = self._watch(full, before)
        why = any_reason(run.world, why)
        if why:
            return why
        compiled, plain, not_compiled = None, None, "exact mode"
        if config.reduce == "fast" and config.fast == "on":
            compiled, not_compiled = self._record_compiled(full, expected)
        if compiled is None:
            plain, why = self._record(full, expected)
            if plain is None:
                return why
            if config.reduce == "fast" and config.fast == "auto":
                not_compiled = "the run is short"
                if self._is_long(full, plain):
                    compiled, not_compiled = self._record_compiled(full, expected)
        graph = compiled or plain
        assert graph is not None
        step.captured, step.compiled = self._replay({0: (full, graph), **self._tails()}), compiled is not None
        self.kept = None  # which would hold a copy of all weights as long as the graphs live
        return " and compiled" if compiled else f" (not compiled: {not_compiled})"

    def _case(self, number: int) -> _Case:
        """A step of this epoch, with its inputs as the loop would have them."""
        run, sampler = self.run, self.run.sampler
        (passes,) = run.plan(self.epoch, range(number, number + 1))
        plan = [item.samples for item in passes]
        inputs = list(run.train.inputs(plan, self.epoch, lambda i: run.seed(self.at, passes[i])))
        samples = int(sampler.step_bounds[number + 1] - sampler.step_bounds[number])
        return _Case(passes, inputs, samples, partial(run.seed, self.at, passes[0]))

    def _body(self, case: _Case, loss: Loss | None = None) -> Body:
        return lambda inputs: self.step.run(iter(inputs), case.passes, case.samples, loss)

    def _plain(self, case: _Case) -> "_Outcome":
        """What a plain step gives, which leaves nothing behind."""
        case.seed()
        return self._outcome(self._body(case)(case.inputs))

    def _outcome(self, out: Tensor) -> "_Outcome":
        """What the step just done gave; it is undone."""
        assert self.kept is not None
        outcome = _Outcome(float(out[0]), self.kept.distance())
        self.kept.put_back()
        return outcome

    def _put_back(self) -> None:
        """Leave a step that was not finished."""
        self.step.forget()
        if self.kept is not None:
            self.kept.put_back()

    def _watch(self, case: _Case, before: "_Outcome") -> tuple["_Outcome", str]:
        """The same, and what in it a graph could not repeat."""
        case.seed()
        out, why = watch(self._body(case), case.inputs, self.step.model, self.step.objective)
        outcome = self._outcome(out)
        if why.startswith("carrier.py"):
            why = "some parameters get no gradient, and workers ask each other which; freeze them with requires_grad_(False)"
        if not why and not outcome.is_like(before, 1e-3):
            why = f"the same batch gives another loss each time, {before.loss:.5g} and {outcome.loss:.5g}"
        return outcome, why

    def _two_seeds(self, case: _Case) -> str:
        if self.step.random and len(case.passes) > 1:
            return f"the model draws random numbers in each of {len(case.passes)} passes, and a graph has one seed"
        return ""

    def _record(self, case: _Case, expected: "_Outcome", loss: Loss | None = None) -> tuple[Graph | None, str]:
        """A graph that does what the plain step does, or why there is none. The same on every worker."""
        graph, why = None, ""
        try:
            self.step.clock.take_recorded()
            graph = Graph(self._body(case, loss), case.inputs)
            graph.stamps = self.step.clock.take_recorded()
        except Exception as error:  # whatever cannot be recorded: the plain step is there
            why = first_line(error)
        self._put_back()
        why = any_reason(self.run.world, why)
        if why and self.run.world.size > 1 and self.run.config.reduce == "fast":
            raise PacelineError(f"the step could not be recorded as a CUDA graph ({why}): start again with --fast off")
        if graph is None or why:
            return None, why  # DDP, had it been half-way, could not go on: hence the error above
        case.seed()
        found = self._outcome(graph(case.inputs))
        if not found.is_like(expected, 0.05):
            why = f"replayed, its loss is {found.loss:.5g} and not {expected.loss:.5g}, or it moves the weights otherwise"
        why = any_reason(self.run.world, why)
        return (None if why else graph), why

    def _record_compiled(self, case: _Case, expected: "_Outcome") -> tuple[Graph | None, str]:
        """The same for the compiled step."""
        self.step.say("compiling the step: about 20 s the first time, less in later runs")
        loss, why = self.step.loss, ""
        try:
            with compiler() as compiled:
                loss = compiled(self.step.loss)
                for _ in range(2):  # the first compiles and tunes
                    self.step.dry_run(case.inputs, case.passes, case.samples, loss)
        except Exception as error:  # whatever the compiler trips over: the plain step is there
            why = f"{type(error).__name__}: {first_line(error)}"
        self._put_back()
        why = any_reason(self.run.world, why)
        return (None, why) if why else self._record(case, expected, loss)

    def _is_long(self, case: _Case, graph: Graph) -> bool:
        """Whether so much training is left that compiling pays, by rank 0's clock."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_TIMED):
            graph(case.inputs)
        torch.cuda.synchronize()
        left_s = _steps_left(self.step, self.at) * (time.perf_counter() - begin) / _TIMED
        self._put_back()
        return bool(self.run.world.broadcast(left_s > COMPILE_PAYS_S))

    def _tails(self) -> dict[int, tuple[_Case, Graph]]:
        """The epoch's last steps, plain: launched one by one, two of them cost as much as ten full ones of batch 128."""
        sampler, found = self.run.sampler, {}
        if self.run.config.epochs - self.epoch < _TAILS_PAY:
            return {}
        for number in range(sampler.full_steps, sampler.steps):
            case = self._case(number)
            if any_reason(self.run.world, self._two_seeds(case)):
                continue
            with _tuned(False):
                graph, _ = self._record(case, self._plain(case))
            if graph is not None:
                found[number] = case, graph
        return found

    def _replay(self, graphs: Mapping[int, tuple[_Case, Graph]]) -> Captured:
        sampler = self.run.sampler

        def captured(step: int, inputs: Iterator[Inputs]) -> Tensor | None:
            number = step % sampler.steps
            case, graph = graphs.get(0 if number < sampler.full_steps else number, (None, None))
            if case is None or graph is None:
                return None
            self.step.enter("data")
            given = [next(inputs) for _ in case.passes]
            if not graph.fits(given):
                return self._body(case)(given)
            self.step.enter(self.step.clock.before_replay)
            done = graph(given)
            self.step.mark(step, "reduce")  # what the host waits for from here on may be another worker
            self.step.clock.replayed(graph.stamps)
            return done

        return captured


@dataclass(frozen=True)
class _Outcome:
    """What a step gave: its loss, and how far it moved the weights."""

    loss: float
    distance: float

    def is_like(self, other: "_Outcome", tolerance: float) -> bool:
        """Equal up to a part of it, two NaNs included."""
        pairs = ((self.loss, other.loss), (self.distance, other.distance))
        return all(a == b or (a != a and b != b) or abs(a - b) <= tolerance * abs(b) + 1e-12 for a, b in pairs)


class _Kept:
    """All that a step changes, to be put back after a trial."""

    def __init__(self, step: Step) -> None:
        self._step, self._fresh = step, not step.optimizer.state
        self._tensors = [*step.model.parameters(), *step.model.buffers(), *step.statistics.tensors(), *self._state()]
        self._tensors += [*step.kept().values(), *step.lrs.values()]
        self._copies = [tensor.detach().clone() for tensor in self._tensors]

    @torch.no_grad()
    def distance(self) -> float:
        """How far the weights have moved."""
        pairs = zip(self._tensors, self._copies, strict=True)
        return float(torch.stack([(tensor - copy).float().norm() for tensor, copy in pairs if tensor.requires_grad]).norm())

    @torch.no_grad()
    def put_back(self) -> None:
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy)
        if self._fresh:  # every optimizer of ours begins at zeros
            for tensor in self._state():
                tensor.zero_()

    def _state(self) -> list[Tensor]:
        states = self._step.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _steps_left(step: Step, at: int) -> int:
    """Steps that could be captured: parts that train by themselves run plainly."""
    return (step.schedule.total_steps if step.local is None else step.local.first) - at


def _why_never(run: Run) -> str:
    """What rules a graph out before anything is tried."""
    if run.world.size > 1 and run.world.backend != "nccl":
        return f"{run.world.backend} carries the messages, and only NCCL's can be part of a graph"
    if run.world.size > 1 and run.step.noise is not None and run.config.reduce == "fast":
        return "gradients are looked at within DDP's averaging"
    if not run.step.lrs:
        return "the optimizer has no fused form for this model, and would read its learning rate from the host"
    if not run.sampler.full_steps:
        return "an epoch has no full step"
    return ""


def _warm_ups(run: Run) -> int:
    """Steps before one is recorded: torch's libraries set themselves up in the first, DDP measures its own first ten."""
    return 11 if run.world.size > 1 and run.config.reduce == "fast" else 1


@contextmanager
def _tuned(on: bool) -> Iterator[None]:
    """Whether cuDNN tries its algorithms on shapes that it meets here: 2 to 5 s for those of one batch size."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
