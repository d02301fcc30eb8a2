"""What one iteration did to memory, as data.

A trace is a list of *moments*. A new moment begins whenever a different set of chunks is used;
between two moments the chunks in use stay the same and only memory that no chunk owns (`other`)
changes. Nothing in a trace depends on budgets or on where chunks were, so the same trace serves the
live run, a plan made before it, and a test.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Access(Enum):
    """How a chunk is used: its contents are needed, needed and changed, or replaced."""

    READ = "read"
    UPDATE = "update"
    OVERWRITE = "overwrite"

    @property
    def writes(self) -> bool:
        return self is not Access.READ

    @property
    def reads(self) -> bool:
        return self is not Access.OVERWRITE


@dataclass(frozen=True, slots=True)
class Use:
    """One chunk used on one tier."""

    chunk: int
    access: Access
    tier: int = 0


@dataclass(slots=True)
class Moment:
    """The uses that begin together, and what happens until the next moment.

    Attributes:
        uses: the chunks that must be there, and how they are used.
        other: peak bytes per tier that no chunk owns, until the next moment.
        blanked: chunks whose contents died before the next moment.
        held: chunks per tier that could not have left, though this moment does not use them: an
            outer use is still open, or something refers to their storage.
    """

    uses: tuple[Use, ...]
    other: dict[int, int] = field(default_factory=dict)
    blanked: tuple[int, ...] = ()
    held: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class Trace:
    """The moments of one iteration.

    Attributes:
        moments: in order; the iteration repeats, so the last is followed by the first.
        segments: `(index of the first moment, name)` of each part of the iteration, such as a
            forward with its input shapes; a run that meets another name has left the trace.
    """

    moments: list[Moment] = field(default_factory=list)
    segments: list[tuple[int, Hashable]] = field(default_factory=list)

    def peak_other(self, tier: int) -> int:
        return max((moment.other.get(tier, 0) for moment in self.moments), default=0)


class Recorder:
    """Writes a trace while an iteration runs."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._before_first: dict[int, int] = {}
        self._now: dict[int, int] = {}

    def segment(self, name: Hashable) -> None:
        self.trace.segments.append((len(self.trace.moments), name))

    def moment(self, uses: Sequence[Use], held: dict[int, tuple[int, ...]] | None = None) -> None:
        # What no chunk owns does not go away with a moment: the next begins with what is there.
        other = {**self._now, **self._before_first}
        self.trace.moments.append(Moment(tuple(uses), other, held=held or {}))
        self._before_first = {}

    def other(self, tier: int, nbytes: int) -> None:
        """Note memory in use that no chunk owns; a moment keeps the largest."""
        noted = self.trace.moments[-1].other if self.trace.moments else self._before_first
        noted[tier] = max(noted.get(tier, 0), nbytes)
        self._now[tier] = nbytes

    def blanked(self, chunk: int) -> None:
        if self.trace.moments:
            self.trace.moments[-1].blanked += (chunk,)
