"""A planned iteration played against the clock.

One thread computes, moment after moment. Beside it, what moves between two tiers waits in a line of
its own: host and device exchange both ways at once; a disk reads and writes in turn. Saves begin
when the plan says so, a load when there is room for it, and a moment waits until its chunks have
come and what it needs fits. Two iterations are played, since the second begins with what the first
left behind; the second counts.

It knows rates and nothing else: no seek, no start-up cost of a copy, no other program.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from patrickstar.memory import Plan


@dataclass(frozen=True)
class Lane:
    """What carries chunks between a tier and the one below.

    Attributes:
        down, up: bytes a second.
        shared: both directions take turns.
    """

    down: float
    up: float
    shared: bool


@dataclass(frozen=True)
class Timeline:
    """One iteration in seconds.

    Attributes:
        step: from its beginning to its end.
        compute, update: of which something computed.
        waited: of which nothing did, by the tier that was waited for.
        busy: that each lane worked, by the tier above it.
        begins: when each moment began.
    """

    step: float
    compute: float
    update: float
    waited: dict[int, float] = field(default_factory=dict)
    busy: dict[int, float] = field(default_factory=dict)
    begins: list[float] = field(default_factory=list)


def play(
    plan: Plan,
    sizes: Mapping[int, int],
    capacities: Sequence[int | None],
    compute: Sequence[float],
    update: Sequence[float],
    lanes: Mapping[int, Lane],
) -> Timeline:
    """Play `plan`.

    Args:
        sizes: bytes of every chunk.
        capacities: of the tiers, fastest first, as the plan was made with.
        compute, update: seconds of each moment.
        lanes: by the tier above.
    """
    clock = _Clock(plan, sizes, capacities, lanes)
    for _ in range(2):
        begun, waited, busy = clock.now, dict(clock.waited), dict(clock.busy)
        begins: list[float] = []
        for moment, seconds in enumerate(map(sum, zip(compute, update, strict=True))):
            clock.begin(moment)
            begins.append(clock.now - begun)
            clock.now += seconds
    return Timeline(
        step=clock.now - begun,
        compute=sum(compute),
        update=sum(update),
        waited={tier: s - waited.get(tier, 0.0) for tier, s in clock.waited.items()},
        busy={tier: s - busy.get(tier, 0.0) for tier, s in clock.busy.items()},
        begins=begins,
    )


class _Clock:
    """Where time has got to, and what is under way."""

    def __init__(
        self,
        plan: Plan,
        sizes: Mapping[int, int],
        capacities: Sequence[int | None],
        lanes: Mapping[int, Lane],
    ) -> None:
        self._plan, self._sizes, self._lanes = plan, sizes, lanes
        self._capacities = [float("inf") if c is None else c for c in capacities]
        self.now = 0.0
        self.waited: dict[int, float] = {}
        self.busy: dict[int, float] = {}
        self._free_at: dict[tuple[int, str], float] = {}
        self._comes: dict[tuple[int, int], float] = {}  # when a chunk is on a tier
        self._saved: dict[tuple[int, int], float] = {}  # when it is on the tier below, too
        self._queued: dict[int, deque[int]] = {tier: deque() for tier in lanes}
        # Bytes that have left the plan's books and not yet the tier, by when they do.
        self._lingering: dict[int, list[tuple[float, int]]] = {tier: [] for tier in lanes}
        self._held = dict.fromkeys(lanes, 0)
        self._moment = 0

    def begin(self, moment: int) -> None:
        """What the plan does at `moment`; comes back when its uses can begin."""
        self._moment = moment
        for action in self._plan.actions[moment]:
            key = (action.chunk, action.tier)
            if action.kind == "save":
                self._saved[key] = self._carry(action.tier, "down", action.chunk, self.now)
            elif action.kind == "evict":
                self._leave(*key)
            else:
                self._queued[action.tier].append(action.chunk)
        for tier in sorted(self._queued, reverse=True):
            self._start_loads(tier)
        for use in self._plan.trace.moments[moment].uses:
            self._await(use.chunk, use.tier)
        for tier in self._lanes:
            self._await_room(tier)

    def _carry(self, tier: int, way: str, chunk: int, earliest: float) -> float:
        lane = self._lanes[tier]
        seconds = self._sizes[chunk] / (lane.down if way == "down" else lane.up)
        line = (tier, "both" if lane.shared else way)
        begins = max(earliest, self._free_at.get(line, 0.0))
        self._free_at[line] = begins + seconds
        self.busy[tier] = self.busy.get(tier, 0.0) + seconds
        return begins + seconds

    def _leave(self, chunk: int, tier: int) -> None:
        gone = self._saved.pop((chunk, tier), 0.0)
        self._comes.pop((chunk, tier), None)
        if gone > self.now:
            heapq.heappush(self._lingering[tier], (gone, self._sizes[chunk]))
            self._held[tier] += self._sizes[chunk]

    def _let_go(self, tier: int) -> None:
        lingering = self._lingering[tier]
        while lingering and lingering[0][0] <= self.now:
            self._held[tier] -= heapq.heappop(lingering)[1]

    def _lacks_room(self, tier: int, starting: int = 0) -> bool:
        """Whether what lingers takes room that the plan gives to others at this moment."""
        self._let_go(tier)
        planned = self._plan.in_use.get(tier)
        if planned is None or not self._held[tier]:
            return False
        waiting = sum(self._sizes[chunk] for chunk in self._queued[tier])
        taken = planned[self._moment] - waiting + self._held[tier]
        return taken + starting > self._capacities[tier]

    def _start_loads(self, tier: int) -> None:
        queued = self._queued[tier]
        while queued and not self._lacks_room(tier, self._sizes[queued[0]]):
            self._start_load(tier)

    def _start_load(self, tier: int) -> None:
        chunk = self._queued[tier].popleft()
        self._comes[chunk, tier] = self._carry(tier, "up", chunk, self._below(chunk, tier))

    def _below(self, chunk: int, tier: int) -> float:
        """When the chunk can be read on the tier below."""
        arrives = self._comes.get((chunk, tier + 1), 0.0)
        return max(self.now, arrives, self._saved.get((chunk, tier), 0.0))

    def _await(self, chunk: int, tier: int) -> None:
        while chunk in self._queued.get(tier, ()):
            self._start_loads(tier)
            if chunk not in self._queued[tier]:
                break
            if self._lingering[tier]:
                self._wait_until(self._lingering[tier][0][0], tier)
            else:  # nothing will leave: the plan has room for it all the same
                self._start_load(tier)
        self._wait_until(self._comes.get((chunk, tier), 0.0), tier)

    def _await_room(self, tier: int) -> None:
        while self._lacks_room(tier) and self._lingering[tier]:
            self._wait_until(self._lingering[tier][0][0], tier)
            self._start_loads(tier)

    def _wait_until(self, when: float, tier: int) -> None:
        if when > self.now:
            self.waited[tier] = self.waited.get(tier, 0.0) + when - self.now
            self.now = when
            self._let_go(tier)
