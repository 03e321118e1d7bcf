"""What an option is, besides its default: its section in the help, its roles and its bounds, kept with the field itself. And
how a value becomes one of the field's type.

    base_lr: float = option("batch and optimizer", 0.05, Role.MODEL, Role.METHOD, more_than=0)

Whoever treats some options differently asks for a role (`names_with`): no list of option names is kept anywhere else.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Self, cast

from paceline.errors import UsageError, unknown
from paceline.hints import unknown_key
from paceline.joins import write_workers_schedule
from paceline.phases import write_batch_schedule
from paceline.settings import Settings, make_settings
from paceline.values import check_text, flag, short


class Role(StrEnum):
    """What an option is about. Every option has exactly one of the first four roles (`EFFECTS`) and any of the others."""

    MODEL = "the trained model depends on it: it must be the same when a run is resumed"
    ROUNDING = "the trained model depends on it only by rounding: it must be the same on resume in exact mode"
    TIMING = "how fast a run trains, or when it stops, depends on it, but not what a step computes"
    OPERATION = "how a run is started, watched and recorded: its results do not depend on it"

    LENGTH = "how long a run trains: a resumed run can be longer than before, but not shorter"
    STATE = "decides what a run's state holds: a branch of the run cannot change it"
    STOP = "when a run stops, or which epoch it keeps: a resumed run may change it, and the record then has the new value"
    LAUNCH = "the launcher needs it before it knows the task's own defaults"
    PLACE = "where a run happens: a task cannot have a default for it"
    START = "belongs to one start of a run: a resumed run does not take it from the record"
    STUDY = "a study or a rehearsal sets it for each of its runs: an arm cannot"
    METHOD = "how to train at a given batch: in a rehearsal, a packaged recipe replaces it"
    OPTIMIZER = "configures built-in optimizers: with a task's own optimizer it matters only if the task's function reads it"
    AUGMENT = "changes training images at random: in a rehearsal, a packaged recipe can replace it"
    SEVERAL_PARTS = "needs a step of several parts: the one worker that a rehearsal compares with cannot have it"
    IMAGES = "for built-in image tasks only: a user's own task prepares its own data and loss"
    WHOLE_RUN = "for a run that trains to its end: `paceline scale` stops after some windows of steps"
    BY_SIZE = "a learning curve sets it for each data size, or it would end runs early: it cannot be given there"
    COMMON = "most runs need it: `--help` lists it; the other options are in `--help-all`"


EFFECTS = frozenset((Role.MODEL, Role.ROUNDING, Role.TIMING, Role.OPERATION))

_MOST_WHOLE, _MOST = 10**12, 1e30  # without an upper bound: a whole number must fit in 64 bits, any other in a float32


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a field of `Config` keeps in its metadata."""

    section: str
    """The heading in the help under which the option is listed."""
    roles: frozenset[Role]
    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None
    parse: Callable[[str], object] | None = None
    """Raises a UsageError for a text that is not valid."""
    metavar: str = ""
    """What the help calls the value; by default N or X for a number, and the last word of a text's name."""

    def check(self, name: str, value: Any) -> None:
        """Raise a UsageError if this value is wrong whatever the other options are."""
        if isinstance(value, str):
            check_text(flag(name), value)
            if self.parse is not None:
                self.parse(value)
        elif isinstance(value, int | float):
            self._check_number(name, value)

    def _check_number(self, name: str, value: float) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{flag(name)} is {value}: it must be a finite number")
        low, high = self.at_least, self.at_most
        above, below = self.more_than, self.less_than
        fits = (low is None or value >= low) and (above is None or value > above)
        fits = fits and (high is None or value <= high) and (below is None or value < below)
        if not fits:
            rules = {"at least": low, "more than": above, "at most": high, "less than": below}
            rule = " and ".join(f"{words} {bound:,}" for words, bound in rules.items() if bound is not None)
            raise UsageError(f"{flag(name)} is {short(value)}: it must be {rule}")
        most = _MOST_WHOLE if isinstance(value, int) else _MOST
        if high is None and abs(value) > most:
            raise UsageError(f"{flag(name)} is {short(value)}: it must be at most {most:,}")


def option(section: str, default: Any, *roles: Role, **about: Any) -> Any:
    """A dataclass field with this default; its metadata says what the option is. `about`: the other fields of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(section=section, roles=frozenset(roles), **about)})


def option_of(field: "dataclasses.Field[Any]") -> Option:
    """What a field made by `option` says about itself."""
    return cast(Option, field.metadata["option"])


class RemembersGiven:
    """Base of a frozen dataclass that remembers, in `given`, which fields its caller passed. None counts as not passed.

    `given` is not a field: comparisons, `vars` and `dataclasses.asdict` leave it out. `dataclasses.replace` passes every field
    and, if there is a pseudo-field `replaces` with the default `copied`, also the object that it copies: then a field is given
    if it was given to that object or has changed.
    """

    __slots__ = ("given",)
    given: frozenset[str]

    def __new__(cls, **options: Any) -> Self:
        known = [name for name in getattr(cls, "__dataclass_fields__", {}) if name != "replaces"]
        for name in options:
            if name not in known and name != "replaces":
                raise unknown_key(name, known)
        self, old = super().__new__(cls), options.pop("replaces", None)
        passed = {name: value for name, value in options.items() if value is not None}
        if old is not None:
            passed = {name: value for name, value in passed.items() if name in old.given or value != getattr(old, name)}
        object.__setattr__(self, "given", frozenset(passed))
        return self

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """For pickle and copy, which would assign to `given` and fail: the object is frozen."""
        for values in state:
            for name, value in values.items():
                object.__setattr__(self, name, value)


copied: Any = property(lambda self: self)
"""The default of the pseudo-field `replaces`: read from an object, it is that object."""


def convert(key: str, value: Any, kind: Any) -> Any:
    """Convert a value from a flag (text), TOML or Python to the type of its field; a UsageError if it does not fit."""
    if isinstance(kind, types.UnionType):  # `int | None`
        if value is None:
            return None
        kind = next(member for member in typing.get_args(kind) if member is not type(None))
    if kind is Settings:
        return make_settings({} if value is None else value)
    if key == "batch_schedule" and isinstance(value, str | Mapping):
        return "" if value == "none" else write_batch_schedule(value)
    if key == "workers_schedule" and isinstance(value, str | Mapping):
        return write_workers_schedule(value)
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            if isinstance(value, str) and "," in value and all(each.strip() in choices for each in value.split(",")):
                raise UsageError(f"{flag(key)} takes one value, not {value!r}: choose one of them")
            raise unknown(f"value for {flag(key)}", short(value), choices)
        return value
    shown = short(repr(value) if isinstance(value, str) else value)
    wrong = UsageError(f"{flag(key)} is {shown}: it must be {_KIND_WORDS[kind]}{', or auto' if key == 'workers' else ''}")
    if kind is bool or isinstance(value, bool):
        if kind is not bool or not isinstance(value, bool):
            raise wrong
        return value
    if kind is str and not isinstance(value, str):
        raise wrong
    if kind is int and isinstance(value, float):
        raise wrong
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None


_KIND_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
