"""Layouts tile a chunk: every element has exactly one holder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.comm import CommValueError, OwnedLayout, ShardLayout, assign_owners

numels = st.integers(0, 10_000)
sizes = st.integers(1, 64)


@given(numels, sizes)
def test_the_ranges_tile_the_chunk_in_rank_order(numel, size):
    layout = ShardLayout(numel, size)
    place = 0
    for rank in range(size):
        start, stop = layout.range(rank)
        assert start == place and stop >= start
        place = stop
    assert place == numel


@given(numels, sizes)
def test_no_rank_holds_more_than_a_padded_shard_and_padding_is_less_than_a_rank_each(numel, size):
    layout = ShardLayout(numel, size)
    lengths = [stop - start for start, stop in map(layout.range, range(size))]
    assert max(lengths) == layout.shard_numel == -(-numel // size)
    assert lengths == sorted(lengths, reverse=True)
    assert layout.padded_numel == size * layout.shard_numel
    assert 0 <= layout.padding < size


@given(st.integers(1, 10_000), sizes, st.data())
def test_the_owner_of_an_element_is_the_rank_whose_range_has_it(numel, size, data):
    layout = ShardLayout(numel, size)
    element = data.draw(st.integers(0, numel - 1))
    start, stop = layout.range(layout.owner(element))
    assert start <= element < stop


@given(numels, sizes, st.data())
def test_an_owned_chunk_is_whole_with_its_owner_and_nowhere_else(numel, size, data):
    owner = data.draw(st.integers(0, size - 1))
    layout = OwnedLayout(numel, size, owner)
    held = {rank: layout.range(rank) for rank in range(size)}
    assert held.pop(owner) == (0, numel)
    assert all(start == stop for start, stop in held.values())


@given(st.dictionaries(st.text(max_size=5), numels, max_size=30), st.integers(1, 8))
def test_owners_are_spread_so_that_no_two_ranks_differ_by_more_than_the_largest_chunk(held, size):
    owners = assign_owners(held, size)
    assert list(owners) == list(held)
    totals = [sum(held[name] for name in held if owners[name] == rank) for rank in range(size)]
    assert max(totals) - min(totals) <= max(held.values(), default=0)


def test_the_assignment_does_not_depend_on_the_order_of_names():
    held = {"a": 5, "b": 5, "c": 9, "d": 1}
    assert assign_owners(held, 2) == assign_owners(dict(reversed(held.items())), 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ShardLayout(-1, 2),
        lambda: ShardLayout(4, 0),
        lambda: ShardLayout(4, 2).range(2),
        lambda: ShardLayout(4, 2).range(-1),
        lambda: ShardLayout(4, 2).owner(4),
        lambda: OwnedLayout(4, 2, 2),
    ],
)
def test_numbers_out_of_range_are_refused(make):
    with pytest.raises(CommValueError, match=r"-1|0|2|4"):
        make()
