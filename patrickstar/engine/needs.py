"""The smallest budgets that a run works with: one answer, for the plan and for every refusal.

What a run takes is found by the planner of the live run on the trace of an iteration, on the trace
of its building, or on both. Where the length of chunks is chosen by a budget, another budget means
another layout, which may need more. So budget and layout are searched together: a budget is named
when the layout that it would get fits into it.

A named budget has a margin, for what no plan knows: norms, losses, small workspaces of kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from patrickstar.engine.construct import construction_length
from patrickstar.engine.grouping import grouped, repeated, updates_of
from patrickstar.engine.home import ChunkHome
from patrickstar.engine.on_paper import building_trace
from patrickstar.engine.state import ModelState, StateSpecification
from patrickstar.memory import ChunkManager, CpuTier, Lru, Moment, Plan, Policy, Trace, make_plan
from patrickstar.optim import UpdateRule

MOST_BACKWARDS = 8  # that are played; more of them need no more memory
_MARGIN = 64 << 10
_EXACT = 256  # a budget that has to be searched is found to one part in so many
Budgets = tuple[int | None, ...]


def at_once(trace: Trace, sizes: Mapping[int, int]) -> int:
    """The most bytes of chunks and others that are there at the same time, wherever they are."""
    return max(_there(trace, sizes), default=0)


def enough_below(most: int, sizes: Mapping[int, int], above: int | None, *, disk: bool) -> int:
    """Bytes that are enough for a tier of memory below another, in whatever order chunks leave it.

    A plan knows one order. The run may have another: its first iteration has fewer chunks, and
    transfers take their time. Chunks are not cut, so of the tier above and of this one as much as
    the largest chunk may stay unused.

    Args:
        most: `at_once` of the run.
        above: the budget of the tier above.
        disk: whether there is a tier below.
    """
    largest = max(sizes.values(), default=0)
    if above is None or most <= above:
        return 0  # nothing ever leaves it
    return largest if disk else most - above + 2 * largest


def enough_on_disk(
    trace: Trace, sizes: Mapping[int, int], above: Sequence[int | None], *, away: int = 0
) -> int:
    """Bytes that are enough for a disk below memory, in whatever order chunks come and go.

    A plan sends chunks away long before their room is needed, so a device that anything has to
    leave may be empty at any time. A chunk that comes has its place above while it still has one on
    the disk, and so has one that makes room for it. Where both are as large as any, no tier above
    may lack more than one.

    Args:
        trace: of an iteration.
        sizes: bytes of every chunk, also of those that the trace does not use.
        above: the budgets of the tiers in memory.
        away: bytes that no chunk of `sizes` owns, and that may yet be in chunks on the disk.
    """
    budgets = [budget for budget in above if budget is not None]
    if len(budgets) < len(above):
        return 0  # nothing has to leave memory
    used = {use.chunk for moment in trace.moments for use in moment.uses}
    idle = sum(nbytes for chunk, nbytes in sizes.items() if chunk not in used)
    everywhere, first = _there(_on_one_tier(trace), sizes), _there(trace, sizes)
    if len(budgets) == 1:
        first = [0] * len(first)
    elif max(first, default=0) > budgets[0]:
        first = [min(moment.other.get(0, 0), budgets[0]) for moment in trace.moments]
    lacking = max((most - there for most, there in zip(everywhere, first, strict=True)), default=0)
    lacking += idle - budgets[-1]
    if lacking <= 0:
        return 0
    largest = max(sizes.values(), default=0)
    everything = sum(sizes.values()) + away  # a disk that holds it takes any chunk at any time
    return min(everything, lacking + (len(budgets) + 1) * largest)


def _there(trace: Trace, sizes: Mapping[int, int]) -> list[int]:
    """Bytes on the first tier at every moment if nothing is ever evicted from it."""
    policy = Lru()  # of no consequence
    plan = make_plan(trace, sizes, [None, None], policy, prefetch=False)
    return plan.in_use.get(0, [0] * len(trace.moments))


def _on_one_tier(trace: Trace) -> Trace:
    """The same iteration on a machine with one tier of memory."""
    return Trace(
        [
            Moment(
                tuple(replace(use, tier=0) for use in moment.uses),
                {0: sum(moment.other.values())},
                moment.blanked,
                {0: tuple({chunk for held in moment.held.values() for chunk in held})},
            )
            for moment in trace.moments
        ]
    )


def with_margin(nbytes: int) -> int:
    """A budget of `nbytes`, with room for what no plan knows."""
    return nbytes + nbytes // 64 + _MARGIN


@dataclass(frozen=True)
class LaidOut:
    """A layout, and what a run does with it.

    Attributes:
        trace: of an iteration; only its updates, if nothing was rehearsed.
        places: for every moment of the rehearsal, repeated as often as there are backwards before
            a step, the one in `trace` that it is part of.
        sizes: bytes of every chunk.
        most: bytes that are there at once, with a margin.
    """

    state: ModelState
    trace: Trace
    places: list[int]
    sizes: dict[int, int]
    most: int


@dataclass(frozen=True)
class Verdict:
    """Whether budgets do.

    Attributes:
        fits: whether they all do.
        smallest: by tier in memory, the least that works with the other budgets as they are, or as
            they must be.
    """

    fits: bool
    smallest: tuple[int, ...]


class Needs:
    """What a run needs of its tiers in memory, whatever their budgets.

    Args:
        module: its parameters count, by name, shape and dtype; they may be anywhere.
        groups: the optimizer's.
        specification: `budget` in it does not count.
        names: of the tiers in memory, fastest first.
        disk: whether there is a tier below them.
        alone: what `rehearsed_alone` returned; None if the inputs are not known yet.
        backwards: before every step; gradients of the first lie beside the second forward.
        dtypes: of the parameters while the model is built, by name; None if it is built already.
        base: bytes that are always there and no chunk owns.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[dict[str, Any]],
        rule: UpdateRule,
        specification: StateSpecification,
        names: Sequence[str],
        policy: Policy,
        *,
        disk: bool,
        alone: Trace | None,
        backwards: int,
        dtypes: Mapping[str, torch.dtype] | None,
        base: int,
    ) -> None:
        self._module, self._groups, self._rule = module, groups, rule
        self._specification, self._names, self._policy = specification, tuple(names), policy
        self._backwards = min(backwards, MOST_BACKWARDS)
        self._disk, self._alone, self._dtypes, self._base = disk, alone, dtypes, base
        self._update_tier = self._names.index(specification.update_on)
        self._laid_out: dict[tuple[int, ...], LaidOut] = {}
        self._found: dict[Budgets, list[int]] = {}
        # By trace and the budgets above a tier: what it must hold. The trace keeps its id its own.
        self._played: dict[tuple[int | None, ...], tuple[Trace, int]] = {}

    @property
    def alone(self) -> Trace | None:
        """What was rehearsed, with every parameter by itself."""
        return self._alone

    @alone.setter
    def alone(self, trace: Trace) -> None:
        self._alone = trace
        self._laid_out.clear()
        self._found.clear()
        self._played.clear()

    def laid_out(self, budgets: Budgets) -> LaidOut:
        """The layout that a run with these budgets has."""
        specification = replace(self._specification, budget=budgets[self._update_tier])
        manager = ChunkManager([CpuTier(name, None) for name in self._names])  # stays empty
        try:
            state = ModelState(
                self._module, self._groups, self._rule, specification, manager, ChunkHome(manager)
            )
        finally:
            manager.close()
        lengths = tuple(aligned.parameter.numel for aligned in state.aligned)
        if lengths not in self._laid_out:
            self._laid_out[lengths] = self._follow(state)
        return self._laid_out[lengths]

    def _follow(self, state: ModelState) -> LaidOut:
        sizes = {chunk.id: chunk.nbytes for a in state.aligned for chunk in a.chunks()}
        if self._alone is not None:
            whole = repeated(self._alone, self._backwards)
            trace, places = grouped(whole, state)
        else:
            other = {0: self._base}
            moments = [Moment(uses, dict(other), (dead,)) for uses, dead in updates_of(state)]
            trace, places = Trace(moments), []
        return LaidOut(state, trace, places, sizes, with_margin(at_once(trace, sizes)))

    def holds(self, budgets: Budgets) -> Verdict:
        """The same as `judge`, at a fraction of its time: what is named for a tier is what it must
        hold under these budgets, which is a budget that works only if all do."""
        needs = tuple(with_margin(need) if need else 0 for need in self.exact(budgets))
        pairs = zip(needs, budgets, strict=True)
        return Verdict(all(budget is None or need <= budget for need, budget in pairs), needs)

    def judge(self, budgets: Budgets) -> Verdict:
        """Whether a run with these budgets works, and the smallest that do."""
        enough = self._raised(budgets, range(len(budgets)))
        smallest = []
        for tier, budget in enumerate(enough):
            least = self._least(enough, tier)
            if budget is not None and budget != budgets[tier]:
                # Should less do than the budget that does not: more than it is asked for.
                least = budget if least <= (budgets[tier] or 0) else least
            smallest.append(least)
        return Verdict(enough == budgets, tuple(smallest))

    def exact(self, budgets: Budgets) -> list[int]:
        """Bytes that each tier must hold at once under these budgets, without a margin."""
        if budgets not in self._found:
            laid = self.laid_out(budgets)
            needs = self._of_trace(laid.trace, laid.sizes, budgets)
            if len(budgets) > 1:
                above = None if budgets[0] is None else max(budgets[0], needs[0])
                enough = enough_below(laid.most, laid.sizes, above, disk=self._disk)
                if not self._disk and needs[1]:
                    # A few bytes more above than were rehearsed send down a whole chunk more.
                    needs[1] += max(laid.sizes.values(), default=0)
                needs[1] = max(needs[1], enough)
            if self._dtypes is not None:
                length = construction_length(budgets)
                trace, sizes = building_trace(laid.state, self._dtypes, length, self._base)
                building = self._of_trace(trace, sizes, budgets)
                needs = [max(both) for both in zip(needs, building, strict=True)]
            self._found[budgets] = needs
        return self._found[budgets]

    def built_in(self, budgets: Budgets) -> list[int]:
        """Bytes that each tier would hold while the model is built if nothing left it."""
        if self._dtypes is None:
            return [0] * len(budgets)
        state, length = self.laid_out(budgets).state, construction_length(budgets)
        trace, sizes = building_trace(state, self._dtypes, length, self._base)
        plan = self.planned(trace, sizes, [None] * (len(budgets) + 1))
        return [plan.peak.get(tier, 0) for tier in range(len(budgets))]

    def planned(
        self, trace: Trace, sizes: Mapping[int, int], capacities: Sequence[int | None]
    ) -> Plan:
        """A plan that loads nothing ahead, so that it needs the least."""
        return make_plan(trace, sizes, capacities, self._policy, prefetch=False)

    def _of_trace(self, trace: Trace, sizes: Mapping[int, int], budgets: Budgets) -> list[int]:
        needs: list[int] = []
        above: list[int | None] = []
        for tier, budget in enumerate(budgets):
            # One tier more than there are, so that the lowest is played too.
            below = [None] * (len(budgets) - tier + 1)
            lowest = not self._disk and tier + 1 == len(budgets)  # nothing can leave it
            # A tier depends on those above it alone, and these are asked about again and again.
            key = (id(trace), *above)
            if key not in self._played:
                plan = self.planned(trace, sizes, [*above, *below])
                self._played[key] = trace, (plan.peak if lowest else plan.smallest).get(tier, 0)
            needs.append(self._played[key][1])
            above.append(None if budget is None else max(budget, needs[-1]))
        return needs

    def _raised(self, budgets: Budgets, tiers: Sequence[int]) -> Budgets:
        """The least budgets from these on that work, if only those of `tiers` are raised."""
        while True:
            needs = [with_margin(need) if need else 0 for need in self.exact(budgets)]
            more = tuple(
                budget if budget is None or tier not in tiers else max(budget, needs[tier])
                for tier, budget in enumerate(budgets)
            )
            if more == budgets:
                return budgets
            budgets = more

    def _least(self, enough: Budgets, tier: int) -> int:
        """The least budget of `tier` beside the others of `enough`, which work."""

        def at(budget: int) -> Budgets:
            return (*enough[:tier], budget, *enough[tier + 1 :])

        low = self._raised(at(0), [tier])[tier] or 0
        if self._raised(at(low), range(len(enough))) == at(low):
            return low
        # Others would need more: where nothing lies below, what one tier cannot hold another must.
        high = enough[tier]
        if high is None:
            high = max(2 * low, sum(self.laid_out(enough).sizes.values()))
        while high - low > high // _EXACT:
            middle = (low + high) // 2
            if self._raised(at(middle), range(len(enough))) == at(middle):
                high = middle
            else:
                low = middle
        return high
