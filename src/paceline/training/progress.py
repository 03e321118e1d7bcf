"""How far a run is and how long it still takes, in words for the terminal; also when the global batch changes on the way."""

from collections.abc import Mapping
from typing import Any

from paceline.contract import Contract
from paceline.output import plural

Row = Mapping[str, Any]


class Pace:
    """Counts the steps of a run. With a batch schedule, epochs have different numbers of steps."""

    def __init__(self) -> None:
        self.total = self._per_epoch = 1
        self._samples = 0
        self._phases: list[tuple[int, int]] = []
        """The first step and the global batch of each phase that has steps, as far as is known."""
        self.whole = True
        """The last epoch was not cut short by `--max-steps`."""

    def start(self, contract: Contract) -> None:
        """The length of the run, as it is known before the first step."""
        self.total, self._per_epoch = contract.total_steps, contract.steps_per_epoch
        self._samples = contract.epoch_samples or contract.train_samples
        self._phases, first = [], 0
        for phase in contract.phases:
            if phase["steps"]:
                self._phases.append((first, phase["global_batch"]))
            first += phase["steps"]

    def phase(self, row: Row) -> None:
        """A phase begins: with `--batch-schedule auto` the run now has another number of steps."""
        self.total, begun = row["total_steps"], (row["step"], row["global_batch"])
        if begun not in self._phases:
            self._phases.append(begun)

    def epoch(self, row: Row) -> None:
        """An epoch has ended."""
        self.whole = row["samples"] == self._samples

    def describe(self, row: Row) -> tuple[str, int, int, str]:
        """For a step row: what is counted, how many are done, of how many, and the time left."""
        step, time_s = row["step"], row["time_s"]
        if not self._phases:
            left_s = time_s / step * (self.total - step)
            return f"epoch {row['epoch']}", step % self._per_epoch or self._per_epoch, self._per_epoch, left_words(left_s)
        # A late step takes longer than an early one, so the time left follows from the samples, not from the steps.
        done, total = self._count(step), self._count(self.total)
        left_s = time_s * max(0.0, total / done - 1) if done else 0.0
        return f"epoch {row['epoch']}, step", step, max(step, self.total), left_words(left_s)

    def _count(self, steps: int) -> int:
        """Samples in the first steps, as if all of them had whole global batches."""
        ends = [first for first, _ in self._phases[1:]] + [max(self.total, steps)]
        spans = zip(self._phases, ends, strict=True)
        return sum(max(0, min(end, steps) - first) * min(batch, self._samples) for (first, batch), end in spans)


def left_words(seconds: float) -> str:
    """`42 s`; from 100 s on hours, minutes and seconds: `0:02:05`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60:,}:{minutes % 60:02}:{rest:02}"


def phase_words(row: Row) -> str:
    """`epoch 1: global batch 2,048 (8 parts), lr x0.59`, and the reason if it is not a given schedule."""
    why = "" if row["why"] == "schedule" else f" ({row['why']})"
    batch = f"global batch {row['global_batch']:,} ({plural(row['virtual_workers'], 'part')})"
    return f"epoch {row['epoch']:.4g}: {batch}, lr x{row['lr_scale']:.2g}{why}"


def join_words(row: Row) -> str:
    """`2 workers from epoch 1 on (joined in 6.2 s)`."""
    how = "joined" if row["workers"] > row["was"] else f"before: {row['was']:,}; changed"
    return f"{plural(row['workers'], 'worker')} from epoch {row['epoch']:.4g} on ({how} in {row['join_s']:.1f} s)"
