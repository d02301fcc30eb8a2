"""From a trace, sizes and budgets to a plan: which chunk moves when.

Tier by tier from the fastest down, the planner decides which chunks stay between their uses (see
`gaps`): a policy that can judge a whole iteration is asked once, any other moment by moment
(`rehearsal`). The rest follows: a chunk that does not stay leaves right after its use, having been
saved right after it was last written, and is loaded again in time for its next use. What a tier
loads and saves are uses of the tier below.

Loads begin ahead of their use where room is left. So that some is, the loads of the largest moment
are kept free for, or as much of that as costs a small share of what moves anyway (`SPARE`).

A plan repeats: what it moves in one iteration it moves in every one. It is advice, the ledger is
the law: a run that departs from the trace ignores the rest of the plan and stays inside its budgets
all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from patrickstar.memory.gaps import Gaps, Load, find_gaps
from patrickstar.memory.policy import Policy, WholeIterationPolicy
from patrickstar.memory.rehearsal import keep_by_policy
from patrickstar.memory.trace import Access, Trace, Use

SPARE = 0.02  # of the bytes that do not fit, given up in addition for loads under way
AHEAD = 16  # loads under way at once, at most


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
        in_use: bytes of each tier at each moment.
    """

    trace: Trace
    actions: list[list[Action]]
    loaded: dict[int, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    peak: dict[int, int] = field(default_factory=dict)
    smallest: dict[int, int] = field(default_factory=dict)
    in_use: dict[int, list[int]] = field(default_factory=dict)

    @property
    def moves(self) -> bool:
        """Whether anything moves in an iteration."""
        return any(self.loaded.values()) or any(self.saved.values())

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
        prefetch: whether loads begin ahead of their use.
    """
    plan = _plan(trace, sizes, capacities, policy, prefetch=prefetch)
    if prefetch and not plan.fits(capacities[:-1]):
        # Loads that begin together need room together on the tier below.
        without = _plan(trace, sizes, capacities, policy, prefetch=False)
        return without if without.fits(capacities[:-1]) else plan
    return plan


def _plan(
    trace: Trace,
    sizes: Mapping[int, int],
    capacities: Sequence[int | None],
    policy: Policy,
    *,
    prefetch: bool,
) -> Plan:
    plan = Plan(trace, [[] for _ in trace.moments])
    uses = [list(moment.uses) for moment in trace.moments]
    for tier, capacity in enumerate(capacities[:-1]):
        gaps = find_gaps(tier, uses, trace.moments, sizes)
        plan.smallest[tier] = gaps.smallest
        if capacity is not None and capacity < gaps.smallest:
            continue
        kept = _keep(gaps, capacity, policy, prefetch=prefetch)
        actions = _TierActions(tier, gaps, kept, capacity, AHEAD if prefetch else 0)
        for now, use, todo in zip(plan.actions, uses, actions.at, strict=True):
            now.extend(todo)
            _hand_down(use, todo, tier + 1)
        plan.loaded[tier], plan.saved[tier] = actions.loaded, actions.saved
        plan.peak[tier], plan.in_use[tier] = actions.peak, actions.taken
    return plan


def _keep(gaps: Gaps, capacity: int | None, policy: Policy, *, prefetch: bool) -> list[bool]:
    everything = gaps.everything
    if capacity is None or capacity >= everything:
        return [True] * len(gaps.gaps)
    if prefetch:
        spare = min(int(SPARE * (everything - capacity)), gaps.most_read)
        # Less than a chunk would be lost without helping any.
        if spare >= max(gap.nbytes for gap in gaps.gaps):
            capacity = max(gaps.smallest, capacity - spare)
    if isinstance(policy, WholeIterationPolicy):
        return policy.keep(gaps, capacity)
    return keep_by_policy(gaps, capacity, policy)


def _hand_down(uses: list[Use], actions: Sequence[Action], lower: int) -> None:
    """What a tier saves is written on the tier below, what it loads is read there."""
    for action in actions:
        if action.kind == "save":  # before anybody uses it there
            uses.insert(0, Use(action.chunk, Access.OVERWRITE, lower))
        elif action.kind == "load":
            uses.append(Use(action.chunk, Access.READ, lower))


def _note_taken(rises: list[int], nbytes: int, first: int, last: int) -> None:
    """`nbytes` are taken from the moment `first` until before `last`, which may be in the next
    iteration: where that begins and ends, so that a long stretch costs no more than a short one."""
    length = len(rises) - 1
    rounds, rest = divmod(max(last - first, 0), length)
    begin = first % length
    end = begin + rest
    rises[0] += rounds * nbytes
    rises[begin] += nbytes
    rises[min(end, length)] -= nbytes
    if end > length:
        rises[0] += nbytes
        rises[end - length] -= nbytes


class _TierActions:
    """What one tier does at each moment, given the gaps it keeps.

    Attributes:
        at: the actions of each moment: saves, then evictions, then loads.
        loaded, saved: bytes these move.
        peak: the highest use of the tier.
    """

    def __init__(
        self, tier: int, gaps: Gaps, kept: Sequence[bool], capacity: int | None, ahead: int
    ) -> None:
        self.tier, self.gaps, self.length = tier, gaps, gaps.length
        self.at: list[list[Action]] = [[] for _ in range(gaps.length)]
        self.taken = list(gaps.needed)
        self.capacity = float("inf") if capacity is None else capacity
        self.loaded = self.saved = 0
        rises = [0] * (gaps.length + 1)  # by how much more is taken than a moment before
        broken: set[int] = set()
        loads = list(gaps.loads)
        leaving: list[tuple[int, int]] = []
        for gap, keep in zip(gaps.gaps, kept, strict=True):
            if keep:
                _note_taken(rises, gap.nbytes, gap.start + 1, gap.end)
                continue
            leaving.append((gap.start + 1, gap.chunk))
            if gap.episode is not None:
                broken.add(gap.episode)
            if gap.reads:
                loads.append(Load(gap.chunk, gap.nbytes, gap.start + 2, gap.end))
        for number, episode in enumerate(gaps.episodes):
            if number in broken or episode.forced is not None:
                after = episode.written + 1
                self._note(
                    "save",
                    episode.chunk,
                    after if episode.forced is None else min(after, episode.forced),
                )
                self.saved += episode.nbytes
        for moment, chunk in leaving:
            self._note("evict", chunk, moment)
        held = itertools.accumulate(rises[: gaps.length])
        self.taken = [n + more for n, more in zip(self.taken, held, strict=True)]
        self._bring(loads, ahead)
        self.peak = max(self.taken, default=0)

    def _note(self, kind: Literal["save", "evict", "load"], chunk: int, moment: int) -> None:
        self.at[moment % self.length].append(Action(kind, chunk, self.tier))

    def _take(self, nbytes: int, first: int, last: int) -> None:
        for moment in range(first, last):
            self.taken[moment % self.length] += nbytes

    def _bring(self, loads: list[Load], ahead: int) -> None:
        """Begin each load as early as there is room for it, the one needed first before others."""
        ends = [load.end % self.length for load in loads]
        order = sorted(range(len(loads)), key=lambda i: (ends[i], loads[i].nbytes))
        for place, index in enumerate(order):
            load = loads[index]
            # No earlier than the use of the load so many places before it.
            earliest = load.end
            if ahead:
                before = ends[order[place - ahead]] if len(loads) > ahead else load.end
                distance = (ends[index] - before) % self.length
                earliest = load.end - (distance or self.length)
            begin = load.end
            while begin > max(load.start, earliest) and self._has_room(load.nbytes, begin - 1):
                begin -= 1
            self._take(load.nbytes, begin, load.end)
            self._note("load", load.chunk, begin)
            self.loaded += load.nbytes

    def _has_room(self, nbytes: int, moment: int) -> bool:
        return self.taken[moment % self.length] + nbytes <= self.capacity
