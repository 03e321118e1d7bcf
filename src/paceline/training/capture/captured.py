"""The fast step on a GPU: batch, forward, backward, all-reduce and optimizer recorded once as a CUDA graph and replayed with
one launch, compiled by torch.compile where that pays off.

A small net's step is some three hundred kernels of a few microseconds. Launched one by one from Python, the GPU waits for its
host most of the time. A graph contains no host work, so nothing on the host may matter. What differs from step to step (sample
numbers, the epoch's key, the learning rate, requests) is in tensors that are filled before each replay. Every replay reads the
seed of the GPU's random numbers again. All full steps of a global batch share a graph; an epoch's last one or two, which are
smaller, have their own. With `--batch-schedule`, the steps of all phases are captured before the first step.

Before the first step the plain step is run, checked for what a graph cannot repeat, captured, and both are compared; then all
weights are restored. Anything that does not fit is reported in one line, and the plain step trains.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from paceline.core.trees import tensors_in
from paceline.dist.agree import any_reason
from paceline.errors import PacelineError, first_line
from paceline.output import stages
from paceline.phases import Phase, is_auto, phases_of_auto
from paceline.training.build import Run
from paceline.training.capture.graph import Body, Graph, Pool, compiler, find_obstacle
from paceline.training.capture.kept import Kept, Outcome, State, tensors_of
from paceline.training.capture.replay import CapturedStep, Case, Kind, kind_of
from paceline.training.own import members, starts_at_zero
from paceline.training.step import Executor, TrainStep, Weighted
from paceline.training.task_step import WITHOUT_GRAPH

COMPILE_PAYS_S = 180.0
"""In auto, compile if this much training is left for each batch: it takes about 20 s the first time and saves 15 to 25%."""
TUNING_PAYS = 10_000
"""In auto, let cuDNN try its algorithms in runs of at least this many steps: 2 to 5 s, for 4% of a large batch's time."""
_TAILS_PAY = 3  # epochs
_TIMED = 10


def capture(run: Run, step: TrainStep, at: int, say: Callable[[str], None]) -> Executor:
    """Capture the steps of a run that starts at step `at`, or say why not and return the plain step. Weights stay as they are.

    Collective: call on every rank.
    """
    config, left = run.config, run.plain_until - at
    if config.fast == "off" or run.world.device.type != "cuda" or left <= 0:
        return step
    begin, now = time.monotonic(), run.parts.phase
    pays = config.fast == "on" or left >= TUNING_PAYS
    with _tuned(torch.backends.cudnn.benchmark or (config.reduce == "fast" and pays)):
        captured, how = _Trials(run, step, at, say).attempt()
    run.parts.switch(now)
    run.parts.statistics.rest()
    if captured is None:
        say(f"the step runs without a CUDA graph: {how}")
        return step
    say(f"the step is captured as a CUDA graph{how}, in {time.monotonic() - begin:.1f} s")
    return captured


class _Trials:
    """The attempt to capture a run's steps: what its stages share."""

    def __init__(self, run: Run, step: TrainStep, at: int, say: Callable[[str], None]) -> None:
        self.run, self.at, self.say = run, at, say
        self.plain, self.step = step, step.unwatched()
        self.epoch = run.sampler.place(at)[0]
        self.kept: Kept | None = None
        self._pool = Pool()
        """All graphs of the run share memory: together they need as much as the largest."""

    def attempt(self) -> tuple[CapturedStep | None, str]:
        """The captured step and how it was captured; or None and why not."""
        try:
            captured, how = self._attempt()
            if captured is None:
                self._forget_state()
            return captured, how
        except PacelineError:
            raise
        except Exception as error:
            if self.run.world.size > 1:  # the others may be in a collective
                raise
            # Capturing is optional: a real mistake in the task shows again in the first step.
            self._put_back()
            self._forget_state()
            return None, f"{type(error).__name__}: {first_line(error)}"

    def _attempt(self) -> tuple[CapturedStep | None, str]:
        run, step, config = self.run, self.step, self.run.config
        phases = self._phases()
        why = _why_never(run) or ("" if phases else "an epoch has no full step")
        if why:
            return None, why
        run.model.train()
        step.update.begin(self.at)
        for phase in phases:
            run.parts.switch(phase)  # makes its statistics, which are restored with all others
        full, *others = [self._case(phase) for phase in phases]
        why = any_reason(run.world, self._shapes_differ(full)) if run.varies else ""
        if why:
            return None, why
        self.kept = Kept(run)
        for _ in range(_warm_ups(run)):
            before = self._run_plain(full)
        # Before anything else that only some workers might do.
        why = any_reason(run.world, self._two_seeds(full) or self.kept.why_not())
        if why:
            return None, why
        expected, why = self._check_plain(full, before)
        why = any_reason(run.world, why)
        if why:
            return None, why
        compiled, weighted, graph, not_compiled = None, None, None, "exact mode"
        if config.reduce == "fast" and config.fast == "on":
            compiled, weighted, not_compiled = self._record_compiled(full, others, expected)
        if compiled is None:
            graph, why = self._record(full, expected)
            if graph is None:
                return None, why
            if config.reduce == "fast" and config.fast == "auto":
                not_compiled = "the run is short"
                if self._is_long(full, graph, 1 + len(others)):
                    compiled, weighted, not_compiled = self._record_compiled(full, others, expected)
        graph = compiled or graph
        assert graph is not None
        graphs = {kind_of(full.step): (full, graph), **self._record_more(others, weighted), **self._record_more(self._tails())}
        captured = CapturedStep(self.plain, graphs, weighted is not None, self.say, self._take_state())
        self.kept = None  # which would hold a copy of all weights as long as the graphs live
        return captured, " and compiled" if weighted else f" (not compiled: {not_compiled})"

    def _phases(self) -> list[Phase]:
        """The kinds of full steps that are still to come, or may come: the next one first, if it can be captured."""
        run, sampler = self.run, self.run.sampler
        before, end = map(sampler.count_by_phase, (self.at, run.plain_until))
        later = [phase for phase, done, count in zip(sampler.phases, before, end, strict=True) if count > done]
        text, now = run.config.batch_schedule, sampler.phases[-1].global_batch
        if is_auto(text):
            possible = phases_of_auto(text, sampler.global_batch, sampler.parts, run.config.smallest_part)
            later += [phase for phase in possible if phase.global_batch > now]
        found = dict.fromkeys(replace(phase, start=0.0) for phase in (sampler.phase_of(self.at), *later))
        return [phase for phase in found if phase.global_batch <= sampler.samples and not run.parts.has_idle(phase)]

    def _take_state(self) -> State | None:
        """Take the state out of the task's own optimizer, if it is new and some of its state may not start at zero: then only
        its first step knows how it starts."""
        optimizer = self.run.update.optimizer
        if all(map(starts_at_zero, members(optimizer))) or not (self.kept and self.kept.fresh):
            return None
        taken = {parameter: tensors_of(state) for parameter, state in optimizer.state.items()}
        optimizer.state.clear()
        return taken

    def _forget_state(self) -> None:
        """After an attempt that failed, let the task's own optimizer, if it is new, initialize its state in the first step."""
        if self.kept is not None and self.kept.fresh and self.run.update.is_own:
            self.run.update.optimizer.state.clear()

    def _case(self, phase: Phase, number: int = 0) -> Case:
        """A step as this epoch would have it if it consisted of this phase alone, with its inputs."""
        kept = self.run.sampler
        self.run.parts.sampler = replace(kept, phases=(phase,))
        try:
            return self._case_of(self.epoch, number)
        finally:
            self.run.parts.sampler = kept

    def _case_of(self, epoch: int, number: int) -> Case:
        """A step of an epoch, with its inputs as the loop would have them."""
        run = self.run
        (step,) = run.parts.steps(epoch, range(number, number + 1))
        samples = [item.samples for item in step.passes]
        inputs = list(run.train.inputs(samples, epoch, lambda i: run.parts.seed(self.at, step.passes[i])))
        return Case(step, inputs, partial(run.parts.seed, self.at, step.passes[0]))

    def _shapes_differ(self, full: Case) -> str:
        """Why batches of the task's own collate cannot share a graph, from two more steps; "" if they can."""
        shapes = [tensor.shape for tensor in tensors_in(full.inputs)]
        for number in range(1, min(3, self.run.sampler.samples // full.step.samples)):
            others = [tensor.shape for tensor in tensors_in(self._case(full.step.phase, number).inputs)]
            if others != shapes:
                return "batches of the task's collate differ in shape from step to step, and a graph has one shape"
        return ""

    def _body(self, case: Case, weighted: Weighted | None = None) -> Body:
        return lambda inputs: self.step.run(case.step, iter(inputs), weighted)

    def _run_plain(self, case: Case) -> Outcome:
        """What a plain step gives. It is undone."""
        case.seed()
        return self._outcome(self._body(case)(case.inputs))

    def _outcome(self, out: Tensor) -> Outcome:
        """What the last step gave. It is undone."""
        assert self.kept is not None
        outcome = Outcome(float(out[0]), self.kept.distance())
        self.kept.put_back()
        return outcome

    def _put_back(self) -> None:
        """Drop an unfinished step."""
        self.run.parts.engine.forget()
        if self.kept is not None:
            self.kept.put_back()

    def _check_plain(self, case: Case, before: Outcome) -> tuple[Outcome, str]:
        """What a plain step gives, and what in it a graph could not repeat. It is undone."""
        case.seed()
        out, why = find_obstacle(self._body(case), case.inputs, self.run.model, self.step.forward.objective)
        outcome = self._outcome(out)
        if why.startswith("carrier.py"):
            why = "some parameters get no gradient, and workers ask each other which; freeze them with requires_grad_(False)"
        if not why and not outcome.is_like(before, 1e-3):
            why = f"the same batch gives a different loss each time, {before.loss:.5g} and {outcome.loss:.5g}"
        return outcome, why

    def _two_seeds(self, case: Case) -> str:
        passes = len(case.step.passes)
        if self.step.checks.random and passes > 1:
            return f"the model draws random numbers in each of {passes} passes, and a graph has one seed"
        return ""

    def _record(self, case: Case, expected: Outcome, weighted: Weighted | None = None) -> tuple[Graph | None, str]:
        """A graph that does what the plain step does, or why not. The same on every worker."""
        graph, why = None, ""
        try:
            self.step.clock.take_recorded()
            graph = Graph(self._body(case, weighted), case.inputs, self.step.clock.take_recorded, self._pool)
        except Exception as error:  # the plain step is always there
            why = first_line(error)
        self._put_back()
        why = any_reason(self.run.world, why)
        if why and self.run.world.size > 1 and self.run.config.reduce == "fast":
            raise PacelineError(f"the step could not be recorded as a CUDA graph ({why}): start again with --fast off")
        if graph is None or why:
            return self._fail(why)  # DDP could not go on from the middle of a step: hence the error above
        case.seed()
        found = self._outcome(graph(case.inputs))
        if not found.is_like(expected, 0.05):
            why = f"its replay gives loss {found.loss:.5g} instead of {expected.loss:.5g}, or moves the weights differently"
        why = any_reason(self.run.world, why)
        return self._fail(why) if why else (graph, "")

    def _fail(self, why: str) -> tuple[None, str]:
        """A graph could not be recorded, for this reason. The next one has memory of its own: torch may still count the failed
        one as recording, or the pool as freed, and then refuses it."""
        self._pool = Pool()
        return None, why

    def _record_compiled(
        self, full: Case, others: Sequence[Case], expected: Outcome
    ) -> tuple[Graph | None, Weighted | None, str]:
        """The same for the compiled step, and the compiled pass, which the other cases can use too."""
        weighted, why = self._compile([full, *others])
        graph, why = (None, why) if weighted is None else self._record(full, expected, weighted)
        return graph, None if graph is None else weighted, why

    def _compile(self, cases: Sequence[Case]) -> tuple[Weighted | None, str]:
        """The compiled pass, ready for the shapes of all cases; or None and why not."""
        several = f" for {len(cases)} batches" if len(cases) > 1 else ""
        self.say(f"compiling the step{several}: about 20 s{' each' if several else ''} the first time, less in later runs")
        stages.enter("compiling the step")
        weighted, why = self.step.forward.run_pass, ""

        def work(case: Case, number: int, share: float) -> tuple[Tensor, Tensor]:
            item = case.step.passes[number]
            self.run.parts.statistics.use(item)
            return weighted(case.inputs[number], share, len(item.samples))

        try:
            with compiler(2 * len(cases)) as compiled:
                weighted = compiled(weighted)
                for case in cases:
                    self.run.parts.switch(case.step.phase)
                    for _ in range(2):  # the first compiles and tunes
                        self.run.parts.engine.dry_run(case.step.passes, case.step.samples, partial(work, case))
        except Exception as error:  # the plain step is always there
            why = f"{type(error).__name__}: {first_line(error)}"
        self._put_back()
        why = any_reason(self.run.world, why)
        return (None if why else weighted), why

    def _is_long(self, case: Case, graph: Graph, batches: int) -> bool:
        """Whether enough training is left for compiling this many batches to pay off, by rank 0's clock."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_TIMED):
            graph(case.inputs)
        torch.cuda.synchronize()
        before, end = map(self.run.sampler.samples_before, (self.at, self.run.plain_until))
        left_s = (end - before) / case.step.samples * (time.perf_counter() - begin) / _TIMED
        self._put_back()
        return bool(self.run.world.broadcast(left_s > COMPILE_PAYS_S * batches))

    def _record_more(self, cases: Sequence[Case], weighted: Weighted | None = None) -> dict[Kind, tuple[Case, Graph]]:
        """Graphs of further kinds of steps, where they can be recorded: the others run plain."""
        found = {}
        for case in cases:
            batch, is_full = case.step.phase.global_batch, case.step.samples == case.step.phase.global_batch
            graph, why = None, any_reason(self.run.world, self._two_seeds(case))
            if not why:
                with _tuned(torch.backends.cudnn.benchmark and is_full):
                    expected = self._run_plain(case)
                    graph, why = self._record(case, expected, weighted)
                    if graph is None and weighted is not None:
                        graph, why = self._record(case, expected)
            if graph is not None:
                found[kind_of(case.step)] = case, graph
            elif is_full:
                self.say(f"steps of a global batch of {batch:,} run without a CUDA graph: {why}")
        return found

    def _tails(self) -> list[Case]:
        """The last steps of epochs that come often enough: launched one by one, two of them cost as much as ten full ones of
        batch 128."""
        sampler, counts = self.run.sampler, Counter[Kind]()
        places: dict[Kind, tuple[int, int]] = {}
        last = self.run.config.epochs - 1
        for epoch in range(self.epoch, min(last, max(self.epoch, sampler.settled)) + 1):
            cut = sampler.cut(epoch)
            for number in range(max(0, cut.steps - 2), cut.steps):
                phase, samples = sampler.phases[cut.phases[number]], int(cut.bounds[number + 1] - cut.bounds[number])
                if samples != phase.global_batch and not self.run.parts.has_idle(phase):
                    kind = phase.global_batch, phase.parts, samples
                    counts[kind] += last - epoch + 1 if epoch >= sampler.settled else 1
                    places.setdefault(kind, (epoch, number))
        return [self._case_of(*places[kind]) for kind, count in counts.items() if count >= _TAILS_PAY]


def _why_never(run: Run) -> str:
    """What rules a graph out before anything is tried."""
    if run.task.step is not None:
        return WITHOUT_GRAPH
    if run.world.size > 1 and run.world.backend != "nccl":
        return f"the backend is {run.world.backend}, and only NCCL can be part of a graph"
    if run.world.size > 1 and run.parts.engine.noise is not None and run.config.reduce == "fast":
        return "the noise scale is measured within DDP's averaging"
    if not run.update.lrs and run.update.is_own:
        name = type(run.update.optimizer).__name__
        return (
            f"{name}, the task's own optimizer, reads its learning rate on the host (it has no capturable=True or fused=True)"
        )
    if not run.update.lrs:
        return "the optimizer has no fused form for this model, and reads its learning rate on the host"
    if run.update.rates.changes_settings:
        return "the task's schedule changes momentum, which a graph would not"
    return ""


def _warm_ups(run: Run) -> int:
    """Steps before the recorded one: torch's libraries initialize in the first, and DDP measures its own first ten."""
    # After one more, the task's own new optimizer is in the state that every later trial starts from.
    return (11 if run.world.size > 1 and run.config.reduce == "fast" else 1) + run.update.is_own


@contextmanager
def _tuned(on: bool) -> Iterator[None]:
    """Let cuDNN try its algorithms on the shapes of this block: 2 to 5 s per batch size."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
