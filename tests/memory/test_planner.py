"""Plans: inside every moment's budget, never more movement for more memory, better than LRU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.memory import Access, FurthestNextUse, Lru, Moment, Trace, Use, make_plan
from patrickstar.memory.planner import Plan

SIZE = 1 << 20


def gpt_trace(layers: int, activation: int = SIZE // 4) -> tuple[Trace, dict[int, int]]:
    """Forward, backward with gradients born, and a step that consumes them; five chunks a layer."""
    parameter, gradient, master, first, second = (
        [layer + kind * layers for layer in range(layers)] for kind in range(5)
    )
    moments = [
        Moment((Use(parameter[n], Access.READ),), {0: n * activation}) for n in range(layers)
    ]
    for n in reversed(range(layers)):
        moments.append(Moment((Use(parameter[n], Access.READ),), {0: n * activation}))
        moments.append(Moment((Use(gradient[n], Access.OVERWRITE),), {0: n * activation}))
    for n in range(layers):
        uses = (
            Use(gradient[n], Access.READ),
            Use(parameter[n], Access.OVERWRITE),
            Use(master[n], Access.UPDATE),
            Use(first[n], Access.UPDATE),
            Use(second[n], Access.UPDATE),
        )
        moments.append(Moment(uses, blanked=(gradient[n],)))
    narrow = dict.fromkeys(parameter + gradient, SIZE // 2)
    wide = dict.fromkeys(master + first + second, SIZE)
    return Trace(moments, [(0, "forward"), (layers, "backward"), (3 * layers, "step")]), (
        narrow | wide
    )


def moved(plan: Plan) -> int:
    return plan.loaded[0] + plan.saved[0]


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5, 0.8])
def test_a_plan_stays_inside_the_budget_at_every_moment(share: float) -> None:
    trace, sizes = gpt_trace(12)
    budget = int(sum(sizes.values()) * share)
    plan = make_plan(trace, sizes, [budget, None], FurthestNextUse())
    assert plan.smallest[0] <= plan.peak[0] <= budget


def test_planning_is_deterministic() -> None:
    trace, sizes = gpt_trace(8)
    plans = [make_plan(trace, sizes, [12 * SIZE, None], FurthestNextUse()) for _ in range(2)]
    assert plans[0].actions == plans[1].actions


def test_with_room_for_everything_nothing_moves() -> None:
    trace, sizes = gpt_trace(6)
    plan = make_plan(trace, sizes, [2 * sum(sizes.values()), None], FurthestNextUse())
    assert moved(plan) == 0
    assert not any(plan.actions)


def test_more_memory_moves_no_more_bytes() -> None:
    trace, sizes = gpt_trace(12)
    total = sum(sizes.values())
    volumes = [
        moved(
            make_plan(trace, sizes, [int(total * s / 20), None], FurthestNextUse(), prefetch=False)
        )
        for s in range(3, 20)
    ]
    assert volumes == sorted(volumes, reverse=True)


# Below that LRU has less to get wrong: at a quarter a plan saves 25 percent.
@pytest.mark.parametrize("share", [0.4, 0.5, 0.6])
def test_a_plan_moves_at_least_30_percent_less_than_lru(share: float) -> None:
    trace, sizes = gpt_trace(24)
    budget = int(sum(sizes.values()) * share)
    planned = make_plan(trace, sizes, [budget, None], FurthestNextUse(), prefetch=False)
    recent = make_plan(trace, sizes, [budget, None], Lru(), prefetch=False)
    assert moved(planned) <= 0.7 * moved(recent)


def test_the_smallest_budget_is_that_of_the_largest_moment() -> None:
    trace, sizes = gpt_trace(4)
    plan = make_plan(trace, sizes, [None, None], FurthestNextUse())
    assert plan.smallest[0] == 4 * SIZE
    assert not plan.fits([4 * SIZE - 1])
    assert plan.fits([4 * SIZE])


@settings(max_examples=60, deadline=None)
@given(
    uses=st.lists(
        st.tuples(st.integers(0, 7), st.sampled_from(list(Access)), st.integers(0, 3)),
        min_size=1,
        max_size=40,
    ),
    budget=st.integers(5, 12),
)
def test_any_trace_is_planned_inside_its_budget(
    uses: list[tuple[int, Access, int]], budget: int
) -> None:
    sizes = {chunk: 1 + chunk % 2 for chunk in range(8)}
    moments = [Moment((Use(chunk, access),), {0: other}) for chunk, access, other in uses]
    plan = make_plan(Trace(moments), sizes, [budget, None], FurthestNextUse())
    assert plan.smallest[0] <= plan.peak[0] <= budget
    same = make_plan(Trace([replace(m) for m in moments]), sizes, [budget, None], FurthestNextUse())
    assert same.actions == plan.actions
