"""Following a plan while the iteration it was made for runs again.

The run tells which uses come; the playback compares them with the trace and answers with what to do
now. A run that skips moments (a dropped layer, an expert not chosen) is found again further on in
the trace: at once if that is near, otherwise when the moment after agrees too, since a chunk that
is merely used once more looks like its next use. One with moments of its own goes on unplanned
until it meets the trace again. Either way it has *strayed*: measured memory cannot be trusted to
the moment any more, and the largest of the segment is assumed from then on, as long as there is
room for it: a guess must not make fail what the trace itself had room for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from patrickstar.memory.planner import Action, Plan
from patrickstar.memory.trace import Use

_NEAR = 8  # moments


@dataclass
class Playback:
    """A position in a plan: the index of the moment that the run is in, -1 before the first.

    Attributes:
        tiers: how many there are, the last one apart.
        strayed: whether the run has departed from the trace since it began.
    """

    plan: Plan
    tiers: int = 1
    position: int = -1
    strayed: bool = False
    _guess: int | None = None
    _segment: tuple[int, int] = (0, 0)  # the moments of the segment that the run is in
    _uses: dict[tuple[int, int], list[tuple[int, bool]]] = field(default_factory=dict, repr=False)
    _moments: dict[tuple[Use, ...], list[int]] = field(default_factory=dict, repr=False)
    _of_chunk: dict[int, list[int]] = field(default_factory=dict, repr=False)
    _others: list[tuple[int, ...]] = field(default_factory=list, repr=False)
    _calm: list[int] = field(default_factory=list, repr=False)  # by position + 1

    def __post_init__(self) -> None:
        self._segment = (0, len(self.plan.trace.moments))
        moments = self.plan.trace.moments
        tiers = range(self.tiers)
        self._others = [tuple(m.other.get(tier, 0) for tier in tiers) for m in moments]
        for position in range(-1, len(moments)):
            following = self._after(position)
            passed = self.plan.actions[position + 1 : following + 1]
            stays = following < len(moments) and not any(passed)
            self._calm.append(following if stays else -1)
        for index, moment in enumerate(self.plan.trace.moments):
            self._moments.setdefault(moment.uses, []).append(index)
            for use in moment.uses:
                entry = (index, use.access.reads)
                self._uses.setdefault((use.chunk, use.tier), []).append(entry)
                self._of_chunk.setdefault(use.chunk, []).append(index)

    def restart(self) -> None:
        """The iteration begins anew."""
        self.position, self.strayed, self._guess = -1, False, None
        self._segment = (0, len(self.plan.trace.moments))

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
        trace = self.plan.trace
        ends = [first for first, _ in trace.segments[1:]] + [len(trace.moments)]
        expected = [
            (first, end, known)
            for (first, known), end in zip(trace.segments, ends, strict=True)
            if first >= self.position + 1
        ]
        for first, end, known in expected if self.strayed else expected[:1]:
            if known == name:
                self._segment = (first, end)
                if self.strayed:  # whatever came before, it may begin as it did
                    self._guess = first - 1
                return True
        return False

    def moment(self, uses: Sequence[Use]) -> list[Action]:
        """The actions that begin with these uses."""
        now = tuple(uses)
        for before in (self.position, self._guess):
            if before is not None and self._uses_after(before) == now:
                return self._go_to(self._after(before))
        self.strayed = True
        self._guess = self._further_on(now)
        if self._guess is not None and self._guess - self.position <= _NEAR:
            return self._go_to(self._guess)
        return []

    def other(self, tier: int) -> int:
        """Bytes on `tier` that no chunk will own until the next moment."""
        if not self.strayed:
            return self.other_here(tier)
        first, end = self._segment
        moments = self.plan.trace.moments[first:end]
        return max((moment.other.get(tier, 0) for moment in moments), default=0)

    def other_here(self, tier: int) -> int:
        """What the trace had of them at this place of it."""
        moments = self.plan.trace.moments
        return moments[self.position].other.get(tier, 0) if self.position >= 0 else 0

    def calm(self, uses: tuple[Use, ...]) -> int:
        """The position of these uses if they come next and the plan does nothing there, or -1."""
        position = -1 if self.strayed else self._calm[self.position + 1]
        if position >= 0 and self.plan.trace.moments[position].uses == uses:
            return position
        return -1

    def others(self, position: int) -> tuple[int, ...]:
        """Bytes on each tier that no chunk owns from `position` on, unless the run strayed."""
        return self._others[position]

    def _after(self, position: int) -> int:
        """The next moment with uses; where there are none, only memory was noted."""
        moments = self.plan.trace.moments
        position += 1
        while position < len(moments) and not moments[position].uses:
            position += 1
        return position

    def _uses_after(self, position: int) -> tuple[Use, ...] | None:
        place, moments = self._after(position), self.plan.trace.moments
        return moments[place].uses if place < len(moments) else None

    def _further_on(self, now: tuple[Use, ...]) -> int | None:
        places = self._moments.get(now, [])
        place = bisect_right(places, self.position)
        return places[place] if place < len(places) else None

    def _go_to(self, position: int) -> list[Action]:
        actions = [
            action
            for moment in range(self.position + 1, position + 1)
            for action in self.plan.actions[moment]
            if action.kind != "load" or not self._is_past(action.chunk, moment, position)
        ]
        self.position, self._guess = position, None
        return actions

    def _is_past(self, chunk: int, moment: int, position: int) -> bool:
        """Whether a load that was due at `moment` was for a use before `position`."""
        uses = self._of_chunk.get(chunk, [])
        place = bisect_left(uses, moment)
        return place < len(uses) and uses[place] < position
