"""Plans played against the clock, small enough to follow with a pencil."""

from __future__ import annotations

import pytest

from patrickstar.memory import Access, FurthestNextUse, Moment, Plan, Trace, Use, make_plan
from patrickstar.planning.timeline import Lane, Timeline, play

SIZE = 100


def plan_of(chunks: int, capacity: int | None, *, prefetch: bool = True) -> Plan:
    moments = [Moment((Use(chunk, Access.UPDATE),)) for chunk in range(chunks)]
    sizes = dict.fromkeys(range(chunks), SIZE)
    return make_plan(Trace(moments), sizes, [capacity, None], FurthestNextUse(), prefetch=prefetch)


def played(plan: Plan, capacity: int | None, rate: float, *, shared: bool = True) -> Timeline:
    length = len(plan.trace.moments)
    sizes = dict.fromkeys(range(length), SIZE)
    lanes = {0: Lane(rate, rate, shared)}
    return play(plan, sizes, [capacity, None], [1.0] * length, [0.0] * length, lanes)


def test_what_is_in_memory_is_not_waited_for() -> None:
    found = played(plan_of(4, None), None, rate=1)
    assert (found.step, found.waited, found.busy) == (4, {}, {})
    assert found.begins == [0, 1, 2, 3]


def test_a_fast_disk_hides_behind_computing() -> None:
    plan = plan_of(8, 4 * SIZE)
    found = played(plan, 4 * SIZE, rate=1e6)
    assert found.step == pytest.approx(8, rel=0.01)
    assert found.busy[0] == pytest.approx((plan.loaded[0] + plan.saved[0]) / 1e6)


def test_a_slow_disk_is_all_the_time_there_is() -> None:
    plan = plan_of(8, 4 * SIZE)
    found = played(plan, 4 * SIZE, rate=1)
    moved = plan.loaded[0] + plan.saved[0]
    assert found.step == pytest.approx(moved, rel=0.05)
    assert found.waited[0] == pytest.approx(found.step - 8)


def test_without_reading_ahead_every_load_is_waited_for() -> None:
    plan = plan_of(4, SIZE, prefetch=False)
    found = played(plan, SIZE, rate=SIZE)
    # Each chunk: one second to save the one before, one to load it, one to compute.
    assert found.step == pytest.approx(12)


def test_two_ways_at_once_take_less_than_turns_where_there_is_room_for_both() -> None:
    plan = plan_of(200, 100 * SIZE)
    turns = played(plan, 100 * SIZE, rate=1)
    both = played(plan, 100 * SIZE, rate=1, shared=False)
    assert both.step < 0.75 * turns.step
