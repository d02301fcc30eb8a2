"""Buckets of neighbouring buffers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from patrickstar.comm.buckets import plan_buckets

buffers = st.lists(st.tuples(st.integers(0, 100), st.sampled_from(["bf16", "fp32"])), max_size=40)


@given(buffers, st.integers(0, 200))
def test_buckets_hold_every_buffer_once_in_order_within_the_limit(listed, limit):
    sizes, kinds = [size for size, _ in listed], [kind for _, kind in listed]
    buckets = plan_buckets(sizes, kinds, limit)
    assert [index for bucket in buckets for index in bucket] == list(range(len(listed)))
    for bucket in buckets:
        assert len(bucket) == 1 or sum(sizes[index] for index in bucket) <= limit
        assert len({kinds[index] for index in bucket}) == 1


@given(buffers, st.integers(0, 200))
def test_no_two_neighbouring_buckets_could_have_been_one(listed, limit):
    sizes, kinds = [size for size, _ in listed], [kind for _, kind in listed]
    buckets = plan_buckets(sizes, kinds, limit)
    for bucket, following in itertools.pairwise(buckets):
        fits = sum(sizes[index] for index in bucket) + sizes[following[0]] <= limit
        assert not fits or kinds[bucket[0]] != kinds[following[0]]


def test_small_buffers_share_a_bucket_and_big_ones_travel_alone():
    assert plan_buckets([4, 4, 100, 4, 4], [0] * 5, 10) == [(0, 1), (2,), (3, 4)]
