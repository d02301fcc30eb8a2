"""Free bytes of a file, and the extents that are taken from them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.memory.extents import Extent, FreeExtents


def space(end: int) -> FreeExtents:
    made = FreeExtents()
    made.grow(end)
    return made


def check(made: FreeExtents, taken: list[tuple[Extent, ...]]) -> None:
    """Every byte is in one extent or free, free stretches are joined, and the count is right."""
    every = sorted([*made.free, *(extent for extents in taken for extent in extents)])
    assert [start for start, _ in every] == [0, *(sum(extent) for extent in every)][: len(every)]
    assert sum(length for _, length in every) == made.end
    assert all(length > 0 for _, length in every)
    assert made.nbytes == sum(length for _, length in made.free)
    assert all(sum(a) < b[0] for a, b in pairwise(made.free))


@given(st.integers(1, 40), st.lists(st.integers(-20, 12), max_size=60))
def test_what_fits_by_the_count_of_bytes_is_placed_in_any_order_of_sizes(
    end: int, steps: list[int]
) -> None:
    made = space(end)
    taken: list[tuple[Extent, ...]] = []
    for step in steps:
        if 0 < step <= end - sum(length for extents in taken for _, length in extents):
            longest = max(length for _, length in made.free)
            taken.append(made.take(step))
            assert sum(length for _, length in taken[-1]) == step
            assert longest < step or len(taken[-1]) == 1, "it is split only where it must be"
        elif step <= 0 and taken:
            made.give_back(taken.pop(-step % len(taken)))
        check(made, taken)
    for extents in taken:
        made.give_back(extents)
    assert made.free == [(0, end)]


@given(st.lists(st.one_of(st.integers(1, 9), st.integers(-20, -1)), max_size=60))
def test_a_file_that_grows_when_it_must_is_never_longer_than_the_most_in_use(
    steps: list[int],
) -> None:
    made = FreeExtents()
    taken: list[tuple[Extent, ...]] = []
    most = 0
    for step in steps:
        if step > 0:
            made.grow(made.end + max(0, step - made.nbytes))
            taken.append(made.take(step))
        elif taken:
            made.give_back(taken.pop(-step % len(taken)))
        most = max(most, made.end - made.nbytes)
        check(made, taken)
    assert made.end == most


@given(st.lists(st.integers(1, 9), max_size=12), st.sets(st.integers(0, 11)))
def test_after_a_change_that_ended_early_all_but_what_is_in_use_is_free(
    sizes: list[int], kept: set[int]
) -> None:
    made = space(sum(sizes) + 3)
    taken = [made.take(size) for size in sizes]
    left = [extents for number, extents in enumerate(taken) if number in kept]
    made.mend(extent for extents in left for extent in extents)
    check(made, left)


def test_the_tightest_of_the_long_enough_is_taken() -> None:
    made = space(20)
    slots = [made.take(size) for size in (5, 1, 3, 1, 10)]
    for number in (0, 2, 4):
        made.give_back(slots[number])
    assert made.take(3) == ((6, 3),)
    assert made.take(4) == ((0, 4),)


def test_where_none_is_long_enough_it_is_as_few_as_there_can_be() -> None:
    made = space(20)
    slots = [made.take(size) for size in (2, 1, 6, 1, 3, 1, 5, 1)]
    for number in (0, 2, 4, 6):
        made.give_back(slots[number])
    assert made.take(9) == ((3, 6), (10, 3)), "the longest, and what is tightest for the rest"
    assert made.take(7) == ((0, 2), (14, 5))


def test_more_than_is_free_is_never_asked_for() -> None:
    with pytest.raises(AssertionError, match="more is taken than is free"):
        space(3).take(4)
