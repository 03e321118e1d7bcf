"""How many parts of a step run in one forward pass: what `--parts-at-once` means for a model."""

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from paceline.config import Config
from paceline.core.norms import can_group
from paceline.core.statistics import spans_workers
from paceline.errors import UsageError
from paceline.output import plural
from paceline.phases import is_auto


@dataclass(frozen=True)
class Grouping:
    """How many parts run in one pass, and why."""

    at_once: int
    why: str
    one_pass: bool = False
    """All parts must share a pass, whatever their sizes: a norm layer looks at the whole step."""


def choose_grouping(model: nn.Module, config: Config, parts: int, workers: int) -> Grouping:
    """Resolve `--parts-at-once` for this model. Raises UsageError if it cannot be done."""
    grouping = _choose_grouping(model, config, parts, workers)
    if not measures_noise(config) or workers > 1 or grouping.at_once < parts:
        return grouping
    if config.parts_at_once:
        raise UsageError(
            f"--parts-at-once {config.parts_at_once} leaves one gradient per step, and no noise to measure: use fewer"
        )
    return Grouping(-(-parts // 2), "together, in two halves that are compared")


def measures_noise(config: Config) -> bool:
    """Whether the gradients of parts are compared."""
    return config.measure_noise or config.lr_rule == "adascale" or is_auto(config.batch_schedule)


def _choose_grouping(model: nn.Module, config: Config, parts: int, workers: int) -> Grouping:
    most, asked = -(-parts // workers), config.parts_at_once
    spanning = next((_describe(name) for name, module in model.named_modules() if spans_workers(module)), None)
    if spanning is not None:
        if config.reduce == "exact":
            raise UsageError(
                f"--reduce exact: {spanning} takes its statistics over all workers, by float sums that depend on"
                " their number; use plain batch norm (norm=batch or part), or --reduce fast"
            )
        if config.sam_rho or measures_noise(config):
            noise = "--batch-schedule auto" if is_auto(config.batch_schedule) else "--lr-rule adascale"
            option = "--sam-rho" if config.sam_rho else "--measure-noise" if config.measure_noise else noise
            raise UsageError(
                f"{option} needs each part's own gradient, but {spanning} takes its statistics over the step: use norm=batch"
            )
        if 0 < asked < most:
            raise UsageError(
                f"--parts-at-once {asked}: {spanning} takes its statistics over the whole step, so a worker's"
                f" {most} parts must run at once; leave --parts-at-once out"
            )
        return Grouping(most, "together: one norm over the whole step", one_pass=True)
    apart = "climbs on its own" if config.sam_rho else "has its own gradient" if config.lr_rule == "adascale" else ""
    if apart:
        if asked > 1:
            option = "--sam-rho" if config.sam_rho else "--lr-rule adascale"
            raise UsageError(f"--parts-at-once {asked}: with {option} every part {apart}; use --parts-at-once 1")
        return Grouping(1, f"in turn: each {apart}" if most > 1 else "one per worker")
    cannot = can_group(model)
    if asked > 1:
        if cannot:
            raise UsageError(
                f"--parts-at-once {asked}: {cannot}, so parts cannot be kept apart in a pass; use --parts-at-once 1"
            )
        groups = -(-parts // asked)
        if config.reduce == "exact" and workers > groups:
            raise UsageError(
                f"--reduce exact with --parts-at-once {asked} makes {plural(groups, 'group')} of the {parts} parts, too few for"
                f" {workers} workers: use at most {plural(groups, 'worker')}, or a smaller --parts-at-once"
            )
        return Grouping(asked, f"{asked} at once")
    if asked == 1 or most == 1:
        return Grouping(1, "in turn" if most > 1 else "one per worker")
    if config.reduce == "exact":
        return Grouping(1, "in turn, for exact sums")
    if cannot:
        return Grouping(1, f"in turn: {cannot}")
    random = next((_describe(name) for name, module in model.named_modules() if _draws(module)), None)
    if random is not None:
        return Grouping(1, f"in turn: {random} draws random numbers")
    return Grouping(most, "together")


def _describe(name: str) -> str:
    return f"layer {name}" if name else "the model"


def _draws(module: nn.Module) -> bool:
    """Whether a layer is known to draw random numbers in training."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    dropout = getattr(module, "dropout", 0)  # a number in attention and recurrent layers
    return isinstance(module, nn.RReLU) or (isinstance(dropout, float) and dropout > 0)
