"""The least that any schedule must move."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bound import lower_bound
from patrickstar.memory import (
    Access,
    Fifo,
    FurthestNextUse,
    Lru,
    Moment,
    Policy,
    Trace,
    Use,
    make_plan,
)

pytest.importorskip("scipy", reason="the linear program is solved by scipy")


def trace_of(*moments: dict[int, Access]) -> Trace:
    return Trace([Moment(tuple(Use(c, a) for c, a in now.items())) for now in moments])


READ, UPDATE, OVERWRITE = Access.READ, Access.UPDATE, Access.OVERWRITE


@pytest.mark.parametrize("access,moved", [(READ, 20), (UPDATE, 40), (OVERWRITE, 0)])
def test_two_chunks_that_never_fit_together_change_places(access: Access, moved: int) -> None:
    trace = trace_of({0: access}, {}, {1: access}, {})
    assert lower_bound(trace, {0: 10, 1: 10}, 10) == pytest.approx(moved)


def test_one_write_is_paid_once_however_often_the_chunk_leaves() -> None:
    trace = trace_of({0: UPDATE}, {1: READ}, {0: READ}, {1: READ})
    # 0 and 1 both come twice an iteration; 0 is written down once.
    assert lower_bound(trace, {0: 10, 1: 10}, 10) == pytest.approx(40 + 10)


def test_what_fits_moves_nothing() -> None:
    trace = trace_of({0: UPDATE}, {1: READ}, {2: READ})
    assert lower_bound(trace, {0: 10, 1: 10, 2: 10}, 30) == 0


def test_a_moment_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="no schedule fits"):
        lower_bound(trace_of({0: READ, 1: READ}), {0: 10, 1: 10}, 15)


@settings(max_examples=60, deadline=None)
@given(
    moments=st.lists(
        st.dictionaries(st.integers(0, 5), st.sampled_from(list(Access)), max_size=2),
        min_size=2,
        max_size=12,
    ),
    sizes=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    room=st.integers(0, 30),
    policy=st.sampled_from([Fifo(), Lru(), FurthestNextUse()]),
    ahead=st.booleans(),
)
def test_no_plan_moves_less_than_the_bound(
    moments: list[dict[int, Access]], sizes: list[int], room: int, policy: Policy, ahead: bool
) -> None:
    trace = trace_of(*moments)
    by_chunk = dict(enumerate(sizes))
    smallest = max(sum(sizes[c] for c in now) for now in moments)
    capacity = smallest + room
    plan = make_plan(trace, by_chunk, (capacity, None), policy, prefetch=ahead)
    assert plan.loaded[0] + plan.saved[0] >= lower_bound(trace, by_chunk, capacity) - 1e-6
