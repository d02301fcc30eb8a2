"""Choices of what to keep: how near the optimum, and never beyond the room."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.memory.gaps import Gaps, find_gaps
from patrickstar.memory.keeping import choose_gaps
from patrickstar.memory.packing import Packing, _least
from tests.memory.traces import gpt_trace, random_trace

SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 0.9)


def gaps_of_gpt(layers: int, **options: int) -> Gaps:
    trace, sizes = gpt_trace(layers, **options)
    return find_gaps(0, [moment.uses for moment in trace.moments], trace.moments, sizes)


def gaps_of_random(seed: int) -> Gaps:
    trace, sizes = random_trace(seed)
    return find_gaps(0, [moment.uses for moment in trace.moments], trace.moments, sizes)


def capacity_of(gaps: Gaps, share: float) -> int:
    """`share` of the way from the smallest capacity to one that holds everything."""
    return gaps.smallest + int(share * (gaps.everything - gaps.smallest))


def taken(gaps: Gaps, kept: list[bool]) -> list[int]:
    room = list(gaps.needed)
    for gap, keep in zip(gaps.gaps, kept, strict=True):
        for moment in range(gap.start + 1, gap.end) if keep else ():
            room[moment % gaps.length] += gap.nbytes
    return room


def cost(gaps: Gaps, kept: list[bool]) -> int:
    away = [gap for gap, keep in zip(gaps.gaps, kept, strict=True) if not keep]
    saved = {gap.episode for gap in away if gap.episode is not None}
    return sum(gap.nbytes for gap in away if gap.reads) + sum(
        gaps.episodes[number].nbytes for number in saved
    )


def optimum(gaps: Gaps, capacity: int) -> float:
    """The fewest bytes, by an integer program in which every gap is kept or not."""
    optimize = pytest.importorskip("scipy.optimize", reason="the optimum is found by scipy")
    count, length = len(gaps.gaps), gaps.length
    price = np.array(
        [gap.nbytes * gap.reads for gap in gaps.gaps] + [e.nbytes for e in gaps.episodes], float
    )
    rows = np.zeros((length + count, len(price)))
    most = np.concatenate((capacity - np.array(gaps.needed, float), np.zeros(count)))
    for index, gap in enumerate(gaps.gaps):  # a variable is 1 when the gap is not kept
        for moment in range(gap.start + 1, gap.end):
            rows[moment % length, index] -= gap.nbytes
            most[moment % length] -= gap.nbytes
        if gap.episode is not None:
            rows[length + index, index], rows[length + index, count + gap.episode] = 1, -1
    if not len(price):
        return 0.0
    solved = optimize.milp(
        price,
        constraints=optimize.LinearConstraint(rows, ub=most),
        integrality=np.ones(len(price)),
        bounds=optimize.Bounds(0, 1),
    )
    assert solved.status == 0
    forced = sum(e.nbytes for e in gaps.episodes if e.forced is not None)
    assert not forced, "these traces have one tier"
    return float(solved.fun)


def check(gaps: Gaps, capacity: int) -> tuple[float, float]:
    choice = choose_gaps(gaps, capacity)
    assert max(taken(gaps, choice.kept)) <= capacity
    assert choice.moved == pytest.approx(cost(gaps, choice.kept))
    assert choice.bound <= choice.moved + 1e-6
    return choice.moved, choice.bound


@pytest.mark.parametrize("layers,accumulation", [(4, 1), (4, 2), (8, 1), (8, 2), (12, 1), (16, 1)])
def test_gpt_traces_move_at_most_5_percent_more_than_the_optimum(
    layers: int, accumulation: int
) -> None:
    gaps = gaps_of_gpt(layers, accumulation=accumulation)
    for share in SHARES:
        capacity = capacity_of(gaps, share)
        moved, bound = check(gaps, capacity)
        best = optimum(gaps, capacity)
        assert bound <= best + 1e-6
        assert moved <= 1.05 * best + 1e-6


def test_small_traces_of_any_kind_move_as_little_as_possible() -> None:
    ratios = []
    for seed in range(40):
        gaps = gaps_of_random(seed)
        for share in (0.2, 0.5, 0.8):
            capacity = capacity_of(gaps, share)
            moved, bound = check(gaps, capacity)
            best = optimum(gaps, capacity)
            assert bound <= best + 1e-6
            ratios.append(moved / best if best else float(moved == 0))
    assert max(ratios) <= 1.05
    assert sum(ratio > 1 + 1e-9 for ratio in ratios) <= 3


@pytest.mark.parametrize("layers,accumulation", [(48, 1), (24, 4)])
def test_large_traces_are_proven_to_be_near_the_optimum(layers: int, accumulation: int) -> None:
    gaps = gaps_of_gpt(layers, accumulation=accumulation)
    for share in (0.2, 0.35, 0.5):
        moved, bound = check(gaps, capacity_of(gaps, share))
        assert moved <= 1.08 * bound, "of which the bound itself may lack some"


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.floats(0, 1))
def test_whatever_is_kept_fits(seed: int, share: float) -> None:
    gaps = gaps_of_random(seed)
    check(gaps, capacity_of(gaps, share))


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_more_memory_never_moves_more_bytes(seed: int) -> None:
    gaps = gaps_of_random(seed)
    capacities = range(gaps.smallest, gaps.everything + 1000, 1000)
    moved = [choose_gaps(gaps, capacity).moved for capacity in capacities]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0


def test_choices_do_not_depend_on_chance() -> None:
    gaps = gaps_of_gpt(8)
    capacity = capacity_of(gaps, 0.4)
    assert choose_gaps(gaps, capacity) == choose_gaps(gaps, capacity)


def test_where_everything_fits_everything_is_kept() -> None:
    gaps = gaps_of_gpt(4)
    choice = choose_gaps(gaps, gaps.everything)
    assert all(choice.kept)
    assert choice.moved == choice.bound == 0
    assert choose_gaps(gaps, gaps.everything - 1).moved > 0


def test_ten_thousand_moments_are_planned_in_seconds() -> None:
    gaps = gaps_of_gpt(100, accumulation=33)
    assert gaps.length == 10_000
    begun = time.process_time()
    moved, _ = check(gaps, capacity_of(gaps, 0.4))
    assert moved > 0
    assert time.process_time() - begun < 15, "about one on the machine this was written on"


@settings(deadline=None)
@given(values=st.lists(st.integers(-5, 5), min_size=1, max_size=40), data=st.data())
def test_the_least_of_spans_is_found(values: list[int], data: st.DataObject) -> None:
    first = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=10))
    last = [data.draw(st.integers(at + 1, len(values))) for at in first]
    found = _least(np.array(values, float), np.array(first), np.array(last))
    assert found.tolist() == [min(values[a:b]) for a, b in zip(first, last, strict=True)]


def test_a_packing_counts_what_moves_through_any_changes() -> None:
    gaps = gaps_of_gpt(6)
    room = 1e9 - np.array(gaps.needed, float)
    packing, rng = Packing(gaps, room), np.random.default_rng(1)
    for _ in range(50):
        packing.change_to(rng.random(len(gaps.gaps)) < 0.5)
        kept = packing.kept.tolist()
        assert packing.moved == pytest.approx(cost(gaps, kept))
        left = 1e9 - np.array(taken(gaps, kept), float)
        assert np.allclose(packing.room, left)
