"""From a trace, sizes and budgets to a plan: which chunk moves when.

The planner plays the iteration through on paper, tier by tier from the fastest down. At each moment
it makes the chunks in use resident, evicts what the policy chooses when the budget of that moment
asks for it, and then *looks ahead*: chunks needed soon are loaded early as long as only chunks
that are needed later have to leave for them. What a tier loads and saves becomes the trace of the
tier below. The iteration repeats, so it is played twice and the second round is the plan.

Reading ahead takes room, and room taken means more eviction. Several distances are tried and the
furthest is kept that moves at most `TOLERANCE` more bytes than none.

A plan is advice: the ledger is the law. A run that departs from the trace ignores the rest of the
plan and stays inside its budgets all the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from patrickstar.memory.policy import Candidate, Policy
from patrickstar.memory.trace import Access, Moment, Trace, Use

TOLERANCE = 1.02
LOOKAHEADS = (16, 8, 4, 2, 1, 0)


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a plan.

    `save` copies a chunk from `tier` to the tier below and keeps it, `evict` makes it leave
    `tier`, `load` brings it to `tier` from below.
    """

    kind: Literal["save", "evict", "load"]
    chunk: int
    tier: int


@dataclass
class Plan:
    """What to do at each moment of an iteration, and what it will cost.

    Attributes:
        trace: the iteration this is for.
        actions: per moment, to be started when the moment begins.
        loaded: bytes per iteration that come to a tier from below, per tier.
        saved: bytes per iteration that leave a tier for the one below, per tier.
        peak: the highest use of each tier.
        smallest: the smallest capacity of each tier that holds its largest moment.
    """

    trace: Trace
    actions: list[list[Action]]
    loaded: dict[int, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    peak: dict[int, int] = field(default_factory=dict)
    smallest: dict[int, int] = field(default_factory=dict)

    def fits(self, capacities: Sequence[int | None]) -> bool:
        return all(
            capacity is None or self.smallest.get(tier, 0) <= capacity
            for tier, capacity in enumerate(capacities)
        )


def make_plan(
    trace: Trace,
    sizes: Mapping[int, int],
    capacities: Sequence[int | None],
    policy: Policy,
    *,
    prefetch: bool = True,
) -> Plan:
    """Plan one iteration of `trace`.

    Args:
        trace: the iteration, which is assumed to repeat.
        sizes: bytes of every chunk in the trace.
        capacities: budget of each tier in bytes, fastest first, None for unlimited. The last tier
            takes whatever comes down.
        policy: chooses what leaves.
        prefetch: whether to look ahead at all.
    """
    plan = Plan(trace, [[] for _ in trace.moments])
    uses = [list(moment.uses) for moment in trace.moments]
    for tier, capacity in enumerate(capacities[:-1]):
        smallest = max(
            (
                sum({use.chunk: sizes[use.chunk] for use in now if use.tier == tier}.values())
                + moment.other.get(tier, 0)
                for now, moment in zip(uses, trace.moments, strict=True)
            ),
            default=0,
        )
        plan.smallest[tier] = smallest
        if capacity is not None and capacity < smallest:
            continue
        best: _Paper | None = None
        least = 0
        # The shortest distance is the yardstick; the furthest that costs no more wins.
        for distance in sorted(LOOKAHEADS if prefetch else (0,)):
            paper = _Paper(tier, capacity, uses, trace.moments, sizes, policy, distance)
            paper.play()
            if best is not None and paper.moved > least * TOLERANCE:
                break
            if best is None:
                least = paper.moved
            best = paper
            if not paper.moved:
                break
        assert best is not None
        for now, actions in zip(plan.actions, best.actions, strict=True):
            now.extend(actions)
        plan.loaded[tier], plan.saved[tier] = best.loaded, best.saved
        plan.peak[tier] = best.peak
        _hand_down(uses, best.actions, tier + 1)
    return plan


def _hand_down(uses: list[list[Use]], actions: list[list[Action]], lower: int) -> None:
    """What a tier loads is read on the tier below, what it saves is written there."""
    for now, todo in zip(uses, actions, strict=True):
        for action in todo:
            if action.kind == "load":
                now.append(Use(action.chunk, Access.READ, lower))
            elif action.kind == "save":
                now.append(Use(action.chunk, Access.OVERWRITE, lower))


class _Paper:
    """One tier played through twice on paper."""

    def __init__(
        self,
        tier: int,
        capacity: int | None,
        uses: list[list[Use]],
        moments: Sequence[Moment],
        sizes: Mapping[int, int],
        policy: Policy,
        distance: int,
    ) -> None:
        self.tier, self.policy, self.sizes, self.distance = tier, policy, sizes, distance
        self.length = len(moments)
        self.capacity = float("inf") if capacity is None else float(capacity)
        self.uses = [{use.chunk: use.access for use in now if use.tier == tier} for now in uses]
        self.written_elsewhere = [
            {use.chunk for use in now if use.tier != tier and use.access.writes} for now in uses
        ]
        self.read_elsewhere = [
            {use.chunk for use in now if use.tier != tier and use.access.reads} for now in uses
        ]
        self.other = [moment.other.get(tier, 0) for moment in moments]
        self.blanked = [moment.blanked for moment in moments]
        self.positions: dict[int, list[int]] = {}
        for index, now in enumerate(self.uses * 3):  # the third round is the second's future
            for chunk in now:
                self.positions.setdefault(chunk, []).append(index)
        self.actions: list[list[Action]] = [[] for _ in range(self.length)]
        self.resident: dict[int, int] = {}  # chunk -> when it came
        self.used_at: dict[int, int] = {}
        self.dirty: dict[int, int] = {}  # chunk -> when it was last written
        self.below: set[int] = set()  # chunks with contents on a lower tier
        self.in_use = self.loaded = self.saved = self.peak = 0

    @property
    def moved(self) -> int:
        return self.loaded + self.saved

    def play(self) -> None:
        # Everything with contents starts below.
        seen: set[int] = set()
        for now in self.uses:
            for chunk, access in now.items():
                if chunk not in seen and access.reads:
                    self.below.add(chunk)
                seen.add(chunk)
        for time in range(2 * self.length):
            if time == self.length:
                self.actions = [[] for _ in range(self.length)]
                self.loaded = self.saved = self.peak = 0
            self._moment(time)

    def _moment(self, time: int) -> None:
        index = time % self.length
        now = self.uses[index]
        for chunk in self.read_elsewhere[index]:
            self._save(chunk, time)  # the lower tier needs what is only here
        for chunk in self.written_elsewhere[index]:
            self._forget(chunk)
            self.below.add(chunk)
        missing = sum(self.sizes[c] for c in now if c not in self.resident)
        self._make_room(time, missing, keep=set(now))
        for chunk, access in now.items():
            if chunk not in self.resident:
                self._arrive(chunk, time, reads=access.reads)
            self.used_at[chunk] = time
            if access.writes:
                self.dirty[chunk] = time
                self.below.discard(chunk)
        self.peak = max(self.peak, self.in_use + self.other[index])
        if self.distance:
            self._look_ahead(time)
        for chunk in self.blanked[index]:
            self._forget(chunk)
            self.below.discard(chunk)

    def _look_ahead(self, time: int) -> None:
        left = self.distance
        limit = 16 + 8 * self.distance  # how far to search; keeps planning linear in the trace
        coming: set[int] = set(self.uses[time % self.length])
        for soon in range(time + 1, time + self.length):
            for chunk, access in self.uses[soon % self.length].items():
                if chunk in coming:
                    continue
                coming.add(chunk)
                if len(coming) > limit:
                    return
                if chunk in self.resident:
                    continue
                # Contents that are written elsewhere or made anew in between cannot come early.
                if not access.reads or chunk not in self.below or self._changes(chunk, time, soon):
                    continue
                if not self._make_room_early(time, soon, self.sizes[chunk], coming):
                    return
                self._arrive(chunk, time, reads=True)
                self.used_at[chunk] = time
                self.peak = max(self.peak, self.in_use + self.other[time % self.length])
                left -= 1
                if not left:
                    return

    def _changes(self, chunk: int, start: int, end: int) -> bool:
        return any(
            chunk in self.written_elsewhere[moment % self.length]
            for moment in range(start + 1, end + 1)
        )

    def _make_room(self, time: int, nbytes: int, keep: set[int]) -> None:
        other = self.other[time % self.length]
        while self.in_use + nbytes + other > self.capacity:
            candidates = [self._candidate(c, time) for c in self.resident if c not in keep]
            self._leave(self.policy.choose(candidates).chunk, time)

    def _make_room_early(self, time: int, soon: int, nbytes: int, coming: set[int]) -> bool:
        """Make room for a chunk needed at `soon`, without touching what is needed before it."""
        other = max(self.other[moment % self.length] for moment in range(time, soon))
        while self.in_use + nbytes + other > self.capacity:
            candidates = [
                candidate
                for candidate in (self._candidate(c, time) for c in self.resident)
                if candidate.chunk not in coming
                and (candidate.next_use is None or time + candidate.next_use > soon)
            ]
            if not candidates:
                return False
            self._leave(self.policy.choose(candidates).chunk, time)
        return True

    def _candidate(self, chunk: int, time: int) -> Candidate:
        positions = self.positions.get(chunk, [])
        place = bisect_right(positions, time)
        coming = positions[place] if place < len(positions) else None
        return Candidate(
            chunk,
            self.sizes[chunk],
            dirty=chunk in self.dirty,
            loaded_at=self.resident[chunk],
            used_at=self.used_at[chunk],
            next_use=None if coming is None else coming - time,
            reloads=coming is not None and self.uses[coming % self.length][chunk].reads,
        )

    def _arrive(self, chunk: int, time: int, *, reads: bool) -> None:
        self.resident[chunk] = time
        self.in_use += self.sizes[chunk]
        if reads and chunk in self.below:
            self.loaded += self.sizes[chunk]
            self._note(time, Action("load", chunk, self.tier))

    def _leave(self, chunk: int, time: int) -> None:
        self._save(chunk, time)
        self._note(time, Action("evict", chunk, self.tier))
        del self.resident[chunk]
        self.in_use -= self.sizes[chunk]

    def _save(self, chunk: int, time: int) -> None:
        written = self.dirty.pop(chunk, None)
        if written is not None:
            # Right after it was last written, so that nobody has to wait for it later.
            self.saved += self.sizes[chunk]
            self.below.add(chunk)
            self._note(min(written + 1, time), Action("save", chunk, self.tier))

    def _forget(self, chunk: int) -> None:
        self.dirty.pop(chunk, None)
        if self.resident.pop(chunk, None) is not None:
            self.in_use -= self.sizes[chunk]

    def _note(self, time: int, action: Action) -> None:
        self.actions[time % self.length].append(action)
