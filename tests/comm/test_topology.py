"""Grids of ranks: rows shard, columns replicate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.comm import CommValueError, Topology


@given(st.integers(1, 8), st.integers(1, 8))
def test_rows_and_columns_partition_the_ranks_and_meet_in_one_rank(replicas, shard_size):
    topology = Topology.from_sizes(range(replicas * shard_size), shard_size)
    assert (topology.replicas, topology.shard_size) == (replicas, shard_size)
    for rank in topology.ranks:
        row, column = topology.shard_ranks(rank), topology.replica_ranks(rank)
        assert set(row) & set(column) == {rank}
        assert all(topology.shard_ranks(other) == row for other in row)
        assert all(topology.replica_ranks(other) == column for other in column)


def test_consecutive_ranks_shard_with_each_other():
    topology = Topology.from_sizes(range(8), 4)
    assert topology.rows == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert topology.replica_ranks(5) == (1, 5)


def test_without_a_size_all_ranks_shard():
    assert Topology.from_sizes(range(3)).rows == ((0, 1, 2),)


def test_a_size_that_does_not_divide_the_ranks_is_refused():
    with pytest.raises(CommValueError, match="6 ranks cannot be cut into sharding groups of 4"):
        Topology.from_sizes(range(6), 4)


@pytest.mark.parametrize("rows", [(), ((),), ((0, 1), (2,)), ((0, 1), (1, 2))])
def test_a_grid_that_is_none_is_refused(rows):
    with pytest.raises(CommValueError):
        Topology(rows)


def test_a_rank_outside_is_refused():
    with pytest.raises(CommValueError, match="rank 7"):
        Topology(((0, 1),)).shard_ranks(7)
