"""How a run stands."""

from enum import StrEnum


class Status(StrEnum):
    """The status of a run, in `result.json`, studies and reports."""

    RUNNING = "running"
    DONE = "done"
    TARGET_REACHED = "target reached"
    STOPPED_EARLY = "stopped early"  # --stop-after epochs without a better one
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    DIVERGED = "diverged"
    REFUSED = "refused"  # in a study: stopped by a mistake in its options or data
    CUT_SHORT = "cut short"  # in reports: nothing says how it ended
    INCOMPLETE = "incomplete"  # in reports: a study with runs still to do
    UNREADABLE = "unreadable"  # on the board: its files lead out of the folder, or cannot be read
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> "Status":
        """Files may state anything."""
        return cls.UNKNOWN

    @property
    def good(self) -> bool:
        """The run finished."""
        return self in (Status.DONE, Status.TARGET_REACHED, Status.STOPPED_EARLY)

    @property
    def final(self) -> bool:
        """The run finished or diverged: doing it again would end the same way."""
        return self.good or self is Status.DIVERGED
