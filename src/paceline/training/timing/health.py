"""The health of a run while it trains: images/s, where a step's time goes, which worker the others wait for, memory, and
whether other programs take its cores.

Workers combine the times of their last steps after each epoch, and in long epochs every few seconds, at a step where they
compare weights anyway: two small collectives. On a CPU every step is timed; on a GPU only the step before a look.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.dist.contention import core_times, has_wait_policy
from paceline.training.build import Run
from paceline.training.timing.clock import Clock, Timed, fill_up, split_steps

LOOK_S = 5.0
"""About this many seconds pass between two looks."""

INPUT_BOUND, LAGS, COMMUNICATES, SHARES_CORES = 0.2, 0.2, 0.3, 0.25
"""From these shares of a step on, a run counts as input-bound, held up by one worker, or bound by communication. The last is
the share of a worker's time that its threads wait for a core."""


class Health:
    """Looks at a run's steps at intervals."""

    def __init__(self, run: Run, clock: Clock) -> None:
        self._run, self._clock = run, clock
        self._gpu = run.world.device.type == "cuda"
        trained = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
        self._gradient_bytes = sum(parameter.nbytes for parameter in trained)
        self._step_s = math.inf  # mean at the last look, the same on all workers: so all agree on when the next look is due
        self.start(0)

    def start(self, samples: int) -> None:
        """Start a new interval, `samples` samples into the epoch."""
        self._since, self._samples, self._steps = time.perf_counter(), samples, 0
        self._core_times = core_times()

    @property
    def has_steps(self) -> bool:
        """Whether there were steps since the last look."""
        return self._steps > 0

    def before(self, step: int) -> None:
        """A step is about to begin. On a GPU it is timed if a look follows it, or if it is the epoch's last full step."""
        self._steps += 1
        if self._gpu:
            every, sampler = self._run.config.check_every, self._run.sampler
            looks = bool(every) and (step + 1) % every == 0 and self.due()
            self._clock.switch(looks or sampler.is_last_full(step))

    def due(self) -> bool:
        """Whether it is time to look, at a step where workers compare weights."""
        return self._steps * self._step_s >= LOOK_S

    def look(self, timed: Sequence[Timed], samples: int) -> dict[str, Any] | None:
        """The steps since the last look as a row; None if none was timed. Collective: call on every rank."""
        if not timed or not self._steps:
            return None
        elapsed_s = time.perf_counter() - self._since
        ran_s, waited_s = (now - then for now, then in zip(core_times(), self._core_times, strict=True))
        found = split_steps(timed, self._run.world, max(0.0, waited_s) / max(ran_s + waited_s, 1e-9))
        step_s = elapsed_s / self._steps
        slowest, lag_s = found.slowest()
        phase = self._run.parts.phase
        counts = self._run.parts.counts(phase)
        row = {
            "samples_per_s": (samples - self._samples) / elapsed_s,
            "step_s": step_s,
            "steps": self._steps,
            "components_s": fill_up(found.means(), step_s),
            "slowest": slowest,
            "lag_s": lag_s,
            "uneven": len(set(counts)) > 1,
            "samples_per_worker": max(counts) * phase.part_batch,
            "core_wait": float(found.core_wait.max()),
            "core_wait_rank": int(found.core_wait.argmax()),
            "memory_bytes": int(found.memory_bytes.max()),
            "gradient_bytes": self._gradient_bytes,
        }
        self._step_s = float(found.step_s.mean())
        return row


def judge(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What holds a run up, if anything: "input", "straggler RANK", "communication", "cores"."""
    shares = {name: value / row["step_s"] for name, value in row["components_s"].items()}
    found: tuple[str, ...] = ("input",) if shares["input"] >= INPUT_BOUND else ()
    if row["slowest"] is not None and row["lag_s"] / row["step_s"] >= LAGS:
        found += (f"straggler {row['slowest']}",)
    if shares["communication"] >= COMMUNICATES:
        found += ("communication",)
    return (*found, "cores") if row["core_wait"] >= SHARES_CORES else found


def describe(row: Mapping[str, Any], unit: str, troubles: Sequence[str] = ()) -> str:
    """The row as one printed line, with what to do about these troubles."""
    step_s, components = row["step_s"], row["components_s"]
    named = [f"{value / step_s:.0%} {name}" for name, value in sorted(components.items(), key=lambda item: -item[1])]
    shown = ", ".join(text for text in named if not text.startswith("0%"))
    text = f"{row['samples_per_s']:,.0f} {unit}/s; a step of {1e3 * step_s:.1f} ms is {shown}"
    if "input" in troubles:
        text += "; input-bound: more --loader-workers, or data as Arrays, which stay on the device"
    if any(trouble.startswith("straggler") for trouble in troubles):
        why = "it has more parts than others" if row["uneven"] else "look at its machine"
        text += f"; worker {row['slowest']} is slowest, {1e3 * row['lag_s']:.1f} ms behind: {why}"
    if "communication" in troubles:
        text += "; communication-bound: larger parts (--global-batch), or a faster link"
    if "cores" in troubles:
        text += f"; {_explain_core_wait(row)}"
    return f"{text}; {row['memory_bytes'] / 2**20:,.0f} MiB per worker"


def _explain_core_wait(row: Mapping[str, Any]) -> str:
    """Other programs, or too many threads or workers of this run, compete for the cores."""
    text = f"worker {row['core_wait_rank']} waits for a core {row['core_wait']:.0%} of its time, because other programs or too"
    text += " many threads use its cores"
    if has_wait_policy():
        return f"{text}; end the programs, or use fewer --workers or a smaller OMP_NUM_THREADS"
    return f"{text}; set OMP_WAIT_POLICY=passive before Python starts, so that idle threads do not block busy ones"
