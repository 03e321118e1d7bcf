"""`--batch-schedule auto`: double the global batch as the measured noise scale grows.

The noise scale is the global batch at which noise and gradient are equally large (`core/noise.py`). Far below it, a step of
twice the batch is worth almost two steps; far above it, hardly more than one. Early in training the noise scale is small: large
steps would waste samples. So a run starts with a small batch, and doubles it whenever the noise scale is more than
`--batch-noise-ratio` times the batch.

The decision is taken at fixed places of an epoch, from numbers that all workers have, so every worker takes the same one; in
exact mode it is the same on any number of workers. Checkpoints hold the phases so far. If the batch reached `--global-batch`, a
run with the phases that were found as its `--batch-schedule`, and `--measure-noise`, trains the same model in exact mode. (With
`--max-steps` it does not: the two learning-rate schedules differ in length.)
"""

import math
from dataclasses import replace

from paceline.core.noise import noise_scale
from paceline.core.parts import Step
from paceline.phases import PLACES, noise_ratio, phases_of_auto, start_of, write_batch_schedule
from paceline.training.build import Run

_LEAST = 8
"""Steps of a phase before it can end: the estimate is a mean over about 20 steps."""


class Growth:
    """Decides when the batch doubles."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ratio = noise_ratio(run.config.optimizer, run.config.batch_noise_ratio)
        sampler, config = run.sampler, run.config
        phases = phases_of_auto(config.batch_schedule, sampler.global_batch, sampler.parts, config.smallest_part)
        self._phases = {phase.global_batch: phase for phase in phases}

    @property
    def why(self) -> str:
        """Why the newest phase has its batch. Call before its first step: then checkpoints hold the noise scale, too."""
        return "the first batch" if len(self._run.sampler.phases) == 1 else f"the noise scale is {self._scale():,.0f}"

    def decide(self, step: Step) -> None:
        """Give the run a new phase, of twice the batch, if it is time after this step. Collective: call on every rank."""
        run, sampler, phase = self._run, self._run.sampler, step.phase
        if phase != sampler.phases[-1] or phase.global_batch == sampler.global_batch or not self._is_place(step):
            return
        scale = run.world.broadcast(self._scale())  # the same, or nearly, on all workers
        if not math.isfinite(scale) or scale <= self._ratio * phase.global_batch:  # infinite: the estimate is not good yet
            return
        start = start_of(sampler.samples_before(step.number + 1), sampler.samples)
        run.set_phases((*sampler.phases, replace(self._phases[2 * phase.global_batch], start=start)))

    def describe(self, steps: int) -> str:
        """The phases of a run's first steps, as a schedule that a run can be given. A decision in the last step only counts if
        the run is extended."""
        sampler = self._run.sampler
        *earlier, last = (phase for phase, count in zip(sampler.phases, sampler.count_by_phase(steps), strict=True) if count)
        if not earlier and last.global_batch == sampler.global_batch:
            return f"the batch was {last.global_batch:,} from the start: it could not grow"
        if not earlier:
            return (
                f"the batch stayed at {last.global_batch:,}: it doubles when the noise scale is {self._ratio:g} times as large"
            )
        text = write_batch_schedule([(phase.start, phase.global_batch) for phase in (*earlier, last)])
        short = f", and did not reach {sampler.global_batch:,}" if last.global_batch < sampler.global_batch else ""
        return f'the batch grew by --batch-schedule "{text}"{short}'

    def _scale(self) -> float:
        """The noise scale, as measured so far."""
        assert self._run.parts.engine.noise is not None
        return noise_scale(*self._run.parts.engine.noise.state.tolist())

    def _is_place(self, step: Step) -> bool:
        """Whether a decision is taken after this step. It must be a full one: then the steps before it stay as they are."""
        sampler = self._run.sampler
        epoch, number = sampler.place(step.number)
        cut = sampler.cut(epoch)
        before, after = (int(bound) * PLACES // sampler.samples for bound in cut.bounds[number : number + 2])
        if step.samples != step.phase.global_batch or after == before:
            return False
        return sampler.count_by_phase(step.number + 1)[-1] >= _LEAST
