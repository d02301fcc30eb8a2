"""From a rehearsed run, budgets and a machine to the answer: fits, moves, takes, waits for.

The plans are those of the live run: made by the same planner, from the same trace, with updates
left to the next forward where the run would leave them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from patrickstar.engine.early import with_early_updates
from patrickstar.engine.initialize import RunSettings
from patrickstar.engine.needs import Verdict, enough_on_disk, with_margin
from patrickstar.engine.overlap import overlapped
from patrickstar.machine import Machine
from patrickstar.memory import Plan, Trace, make_plan
from patrickstar.memory.transfer import AT_ONCE
from patrickstar.planning.overhead import Overhead
from patrickstar.planning.rehearsed import Rehearsed
from patrickstar.planning.timeline import Lane, Timeline, play
from patrickstar.planning.timing import Seconds

_WORTH_NAMING = 0.1  # of a step: whoever waits less is bound by what computes


@dataclass(frozen=True)
class TierPrediction:
    """Bytes of one tier.

    Attributes:
        budget: None for no limit.
        smallest: the least that works with the other budgets as they are.
        peak: the most that is used, from the first moment on; of a disk, by a step that is planned.
        reserved: of a disk, the length of its file, which is taken whole before the first step.
    """

    budget: int | None
    smallest: int
    peak: int
    reserved: int = 0

    @property
    def fits(self) -> bool:
        """Whether the budget holds."""
        return self.budget is None or self.smallest <= self.budget


@dataclass(frozen=True)
class StepPrediction:
    """Seconds of a step.

    Attributes:
        total: of the whole step: compute, update and waiting.
        compute: forward and backward.
        update: of the optimizer.
        waiting: for chunks or room, by what carries them: "link" (host and device) or "disk".
        busy: that these worked, waited for or not.
        overlapped: of `busy`, how much was hidden behind computing.
        bottleneck: "compute", "update", "link" or "disk".
        measured: whether operators were timed on this machine; otherwise this is the step at best.
    """

    total: float
    compute: float
    update: float
    waiting: dict[str, float]
    busy: dict[str, float]
    overlapped: float
    bottleneck: str
    measured: bool


@dataclass(frozen=True)
class Prediction:
    """The answer.

    Attributes:
        fits: whether every budget holds.
        tiers: by name, fastest first.
        plan: that the run would follow.
        moved: bytes a step between neighbouring tiers, by "from->to".
        step: how long; None without a machine, or if it does not fit.
        usage: bytes of each tier in memory at each moment, under the budgets.
        moments: seconds from the step's beginning at which these moments begin; empty without step.
    """

    fits: bool
    tiers: dict[str, TierPrediction]
    plan: Plan = field(repr=False)
    moved: dict[str, int] = field(default_factory=dict)
    step: StepPrediction | None = None
    usage: dict[str, list[int]] = field(default_factory=dict)
    moments: list[float] = field(default_factory=list)

    @property
    def peak(self) -> dict[str, int]:
        """The most that each tier holds."""
        return {name: tier.peak for name, tier in self.tiers.items()}


def predict(
    run: Rehearsed,
    settings: RunSettings,
    machine: Machine | None,
    seconds: Seconds | None,
    *,
    overhead: Overhead | None = None,
    known: Prediction | None = None,
    named: bool = True,
) -> Prediction:
    """What `run` takes under the budgets of `settings`, on `machine` if one is given.

    Args:
        seconds: of an operator on the machine.
        overhead: what the engine takes beside, if it and `seconds` were measured.
        known: the answer for the same run and settings on another machine: only the step differs.
        named: whether `smallest` is looked for; if not, it is what these budgets make a tier hold.
    """
    if known is None:
        budgets, disk = run.budgets, settings.disk is not None
        # Without a disk nothing leaves the lowest tier; one more below it shows what it must hold.
        plan = _live_plan(run, settings, [*budgets, None] if disk else [*budgets[:-1], None, None])
        verdict = run.needs.judge(budgets) if named else run.needs.holds(budgets)
        tiers = _tiers(run, settings, plan, verdict)
        fits = verdict.fits and all(tier.fits for tier in tiers.values())
    else:
        plan, tiers, fits = known.plan, known.tiers, known.fits
    names = list(tiers)
    moved: dict[str, int] = {}
    for index, (upper, lower) in enumerate(itertools.pairwise(names)):
        moved[f"{upper}->{lower}"] = plan.saved.get(index, 0)
        moved[f"{lower}->{upper}"] = plan.loaded.get(index, 0)
    usage = {name: plan.in_use.get(i, []) for i, name in enumerate(run.names)}
    step, moments = None, []
    if machine is not None and seconds is not None and fits:
        timeline = _timeline(run, plan, machine, seconds, overhead or Overhead(), names)
        step = _step(timeline, names, measured=overhead is not None)
        moments = timeline.begins
    return Prediction(fits, tiers, plan, moved, step, usage, moments)


def _live_plan(run: Rehearsed, settings: RunSettings, capacities: Sequence[int | None]) -> Plan:
    """The plan that the run would follow from its second or third iteration on."""

    def planned(trace: Trace) -> Plan:
        prefetch = settings.prefetch and settings.plan
        return make_plan(trace, run.sizes, capacities, settings.policy, prefetch=prefetch)

    def with_updates(trace: Trace) -> Plan | None:
        """The plan with what `trace` updates in its step put off, if the run would follow it."""
        later = overlapped(trace, run.family) if settings.overlap_update else None
        plan = None if later is None else planned(later)
        return plan if plan is not None and plan.fits(capacities[:-1]) else None

    if settings.plan and settings.update_in_backward:
        for early in with_early_updates(run.trace, run.family, run.plain, run.sizes, capacities):
            plan = planned(early.trace)
            if plan.fits(capacities[:-1]):
                put_off = with_updates(early.trace) if plan.moves else None
                if put_off is not None or not early.leaves_some:
                    return put_off or plan
    moves = any(
        capacity is not None and capacity < run.everything(tier)
        for tier, capacity in enumerate(capacities[:-1])
    )
    put_off = with_updates(run.trace) if settings.plan and moves else None
    return put_off or planned(run.trace)


def _tiers(
    run: Rehearsed, settings: RunSettings, plan: Plan, verdict: Verdict
) -> dict[str, TierPrediction]:
    # An accelerator is given what was built in the host's memory.
    built = [0] * len(run.names) if settings.device is not None else run.needs.built_in(run.budgets)
    found = {
        name: TierPrediction(
            budget,
            smallest,
            max(
                _peak(run, plan, index, budget, smallest),
                built[index] if budget is None else min(budget, built[index]),
            ),
        )
        for index, (name, budget, smallest) in enumerate(
            zip(run.names, run.budgets, verdict.smallest, strict=True)
        )
    }
    if settings.disk is not None:
        found["disk"] = _disk(run, plan, settings.disk[1])
    return found


def _peak(run: Rehearsed, plan: Plan, tier: int, budget: int | None, smallest: int) -> int:
    """The most that a tier in memory holds, from the first iteration on.

    That one follows no plan, and what is there stays as long as nobody needs its room.
    """
    most = plan.peak.get(tier, smallest)
    if budget is None or tier not in plan.peak or not plan.saved.get(tier):
        return most
    return max(most, min(budget, run.everything(tier)))


def _disk(run: Rehearsed, plan: Plan, budget: int | None) -> TierPrediction:
    if run.budgets[-1] is None:
        return TierPrediction(budget, 0, 0)
    total = sum(run.sizes.values())
    building = sum(run.needs.built_in(run.budgets)) - run.budgets[-1]
    if building > 0:  # a chunk that is under way is in two places, and none is cut
        building += (AT_ONCE + 1) * max(run.sizes.values(), default=0)
    # The run may hold a little more than was rehearsed, and is asked the same question.
    less = [None if held is None else max(2 * held - with_margin(held), 0) for held in run.budgets]
    least = min(total, max(building, enough_on_disk(run.trace, run.sizes, less)))
    reserved = total if budget is None else min(total, budget)
    return TierPrediction(
        budget, least, _most_on_disk(plan, run.sizes, len(run.names) - 1), reserved
    )


def _most_on_disk(plan: Plan, sizes: Mapping[int, int], lowest: int) -> int:
    """The most bytes that the disk below the tier `lowest` holds at once.

    A copy stays there, whoever loads it, until its contents are changed or die.
    """
    there: set[int] = set()
    taken = most = 0
    for _ in range(2):  # the second iteration begins with what the first left behind
        for moment, actions in zip(plan.trace.moments, plan.actions, strict=True):
            saved = {a.chunk for a in actions if a.kind == "save" and a.tier == lowest} - there
            there |= saved
            taken += sum(sizes[chunk] for chunk in saved)
            most = max(most, taken)
            stale = {use.chunk for use in moment.uses if use.access.writes} | {*moment.blanked}
            taken -= sum(sizes[chunk] for chunk in stale & there)
            there -= stale
    return most


def _timeline(
    run: Rehearsed,
    plan: Plan,
    machine: Machine,
    seconds: Seconds,
    overhead: Overhead,
    names: Sequence[str],
) -> Timeline:
    on_device = run.names[run.update_tier] == "device"
    updates = machine.computes if on_device else machine.processor
    begins = [first for first, name in run.trace.segments if name == "step"]
    until = begins[0] if begins else len(run.trace.moments)
    computing = [0.0] * len(run.trace.moments)
    step = run.work_moments - 1  # where nothing computes but updates
    each = run.work.seconds(step, seconds, machine.computes.copy_bytes_per_s)
    for index, in_trace in enumerate(run.places[:-1]):
        computing[in_trace] += each[index % step] + overhead.moment
    of = {id(moment): n for n, moment in enumerate(run.trace.moments[:until])}
    compute, update = [], []
    for moment, actions in zip(plan.trace.moments, plan.actions, strict=True):
        place = of.get(id(moment))
        moving = [run.sizes[action.chunk] for action in actions if action.kind != "evict"]
        beside = len(moving) * overhead.move + sum(moving) * overhead.moved_byte
        loaded = [a for a in actions if a.kind == "load" and names[a.tier + 1] == "disk"]
        beside += sum(run.sizes[action.chunk] for action in loaded) * overhead.fresh_byte
        compute.append(beside + (0.0 if place is None else computing[place]))
        chunk = run.family.get(moment.uses[0].chunk, -1) if moment.uses else -1
        taken = run.updates.get(chunk, 0) / updates.update_rate
        taken += run.tensors.get(chunk, 0) * overhead.update
        update.append(0.0 if place is not None else taken)
    lanes: dict[int, Lane] = {}
    for index, (upper, lower) in enumerate(itertools.pairwise(names)):
        if lower == "disk":
            assert machine.disk is not None
            lanes[index] = Lane(machine.disk.write, machine.disk.read, shared=True)
        elif machine.accelerator is not None and upper == "device":
            link = machine.accelerator.link_bytes_per_s
            lanes[index] = Lane(link, link, shared=False)
        else:  # a part of the host's memory stands for the device
            copy = machine.processor.copy_bytes_per_s / 2
            lanes[index] = Lane(copy, copy, shared=True)
    return play(plan, run.sizes, [*run.budgets, None], compute, update, lanes)


def _step(timeline: Timeline, names: Sequence[str], *, measured: bool) -> StepPrediction:
    def by_lane(of: dict[int, float]) -> dict[str, float]:
        return {_lane_name(names, tier): s for tier, s in sorted(of.items()) if s > 0}

    waiting, busy = by_lane(timeline.waited), by_lane(timeline.busy)
    waited = sum(waiting.values())
    parts = {"compute": timeline.compute, "update": timeline.update}
    if waited > _WORTH_NAMING * timeline.step:
        parts = waiting
    return StepPrediction(
        total=timeline.step,
        compute=timeline.compute,
        update=timeline.update,
        waiting=waiting,
        busy=busy,
        overlapped=max(0.0, sum(busy.values()) - waited),
        bottleneck=max(parts, key=lambda part: parts[part]),
        measured=measured,
    )


def _lane_name(names: Sequence[str], tier: int) -> str:
    return "disk" if names[tier + 1] == "disk" else "link"
