"""Following a plan while the iteration it was made for runs again.

The run tells which uses come; the playback compares them with the trace and answers with what to do
now. A run that skips moments (a dropped layer, an expert not chosen) is found again further on in
the trace, one with moments of its own goes on unplanned until it meets the trace again. Either way
it has *strayed*: measured memory cannot be trusted to the moment any more, and the largest of the
segment is assumed from then on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from patrickstar.memory.planner import Action, Plan
from patrickstar.memory.trace import Use

_SEARCH = 256  # moments to look ahead for a run that left the trace


@dataclass
class Playback:
    """A position in a plan."""

    plan: Plan
    position: int = -1
    strayed: bool = False
    _bounds: tuple[int, int | None] = (0, None)  # of the segment that runs, in moments
    _uses: dict[tuple[int, int], list[tuple[int, bool]]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for index, moment in enumerate(self.plan.trace.moments):
            for use in moment.uses:
                entry = (index, use.access.reads)
                self._uses.setdefault((use.chunk, use.tier), []).append(entry)

    def next_use(self, chunk: int, tier: int) -> tuple[int | None, bool]:
        """Moments until the next use of `chunk` on `tier`, and whether that use reads it.

        The iteration repeats, so a chunk used earlier is used again; None if it never is.
        """
        uses = self._uses.get((chunk, tier))
        if not uses:
            return None, True
        place = bisect_right(uses, (self.position, True))
        if place < len(uses):
            return uses[place][0] - self.position, uses[place][1]
        return uses[0][0] + len(self.plan.trace.moments) - self.position, uses[0][1]

    def segment(self, name: Hashable) -> bool:
        """Note that the run begins a segment; False if the trace has another one here."""
        segments = self.plan.trace.segments
        for place, (first, expected) in enumerate(segments):
            if first < self.position + 1:
                continue
            if expected == name:
                following = segments[place + 1 :]
                self._bounds = (first, following[0][0] if following else None)
                return True
            if not self.strayed:
                return False
        return False

    def moment(self, uses: Sequence[Use]) -> list[Action]:
        """The actions that begin with these uses."""
        moments = self.plan.trace.moments
        now = tuple(uses)
        for ahead in range(self.position + 1, min(self.position + 1 + _SEARCH, len(moments))):
            if moments[ahead].uses == now:
                self.strayed = self.strayed or ahead != self.position + 1
                actions = [
                    a for i in range(self.position + 1, ahead + 1) for a in self.plan.actions[i]
                ]
                self.position = ahead
                return actions
        self.strayed = True
        return []

    def other(self, tier: int) -> int:
        """Bytes on `tier` that no chunk will own until the next moment."""
        trace = self.plan.trace
        if self.strayed:
            return max(
                (moment.other.get(tier, 0) for moment in trace.moments[slice(*self._bounds)]),
                default=0,
            )
        return trace.moments[self.position].other.get(tier, 0) if self.position >= 0 else 0
