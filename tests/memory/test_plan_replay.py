"""Plans replayed by somebody else: possible, enough, and inside every budget."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.memory import Fifo, FurthestNextUse, Lru, Plan, Policy, make_plan

from .traces import Replay, gpt_trace, random_trace

POLICIES = [FurthestNextUse(), Lru(), Fifo()]


def check(plan: Plan, sizes: dict[int, int], capacities: Sequence[int | None]) -> None:
    if not plan.fits(capacities[:-1]):
        return
    replay = Replay(plan, sizes, capacities)
    replay.run()
    for tier in range(len(capacities) - 1):
        assert replay.moved.get(("load", tier), 0) == plan.loaded[tier]
        assert replay.moved.get(("save", tier), 0) == plan.saved[tier]
        capacity = capacities[tier]
        assert capacity is None or plan.peak[tier] <= capacity


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    extra=st.integers(0, 12),
    policy=st.sampled_from(POLICIES),
    prefetch=st.booleans(),
)
def test_any_trace_on_two_tiers(seed: int, extra: int, policy: Policy, prefetch: bool) -> None:
    trace, sizes = random_trace(seed)
    smallest = make_plan(trace, sizes, [None, None], policy).smallest[0]
    capacities = [smallest + extra * 1000, None]
    check(make_plan(trace, sizes, capacities, policy, prefetch=prefetch), sizes, capacities)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_gpt_on_two_tiers(share: float, policy: Policy, prefetch: bool) -> None:
    trace, sizes = gpt_trace(12, accumulation=2)
    capacities = [max(22_000, int(share * sum(sizes.values()))), None]
    plan = make_plan(trace, sizes, capacities, policy, prefetch=prefetch)
    assert plan.fits(capacities[:-1])
    check(plan, sizes, capacities)


@pytest.mark.parametrize("device,host", [(20_000, 60_000), (12_000, 40_000), (40_000, 150_000)])
def test_a_gpt_that_is_updated_on_the_host_on_three_tiers(device: int, host: int) -> None:
    trace, sizes = gpt_trace(8, update_tier=1)
    capacities = [device, host, None]
    plan = make_plan(trace, sizes, capacities, FurthestNextUse())
    assert plan.fits(capacities[:-1])
    check(plan, sizes, capacities)
    assert plan.loaded[0] > 0


def test_loads_begin_ahead_of_their_use_where_there_is_room() -> None:
    trace, sizes = gpt_trace(96)  # large enough that the loads of a moment are a small share
    capacities = [int(0.4 * sum(sizes.values())), None]
    early = make_plan(trace, sizes, capacities, FurthestNextUse())
    late = make_plan(trace, sizes, capacities, FurthestNextUse(), prefetch=False)

    def waiting(plan: Plan) -> int:
        """Bytes of loads that begin in the very moment that needs them."""
        return sum(
            sizes[action.chunk]
            for moment, actions in zip(trace.moments, plan.actions, strict=True)
            for action in actions
            if action.kind == "load" and any(u.chunk == action.chunk for u in moment.uses)
        )

    assert waiting(late) == late.loaded[0]
    assert waiting(early) < 0.2 * early.loaded[0]
    moved = early.loaded[0] + early.saved[0]
    assert moved <= 1.05 * (late.loaded[0] + late.saved[0])
