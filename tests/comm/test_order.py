"""Orders of collectives: merging and fingerprints."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from patrickstar.comm import Collective, Slot, merge_orders
from patrickstar.comm.order import fingerprint

slots = st.builds(Slot, st.sampled_from(list(Collective)), st.sampled_from("abcd"))
orders = st.lists(st.lists(slots, max_size=12), min_size=1, max_size=4)


def gathers(chunks: str) -> list[Slot]:
    return [Slot(Collective.ALL_GATHER, chunk) for chunk in chunks]


@given(orders)
def test_a_merged_order_has_room_for_every_rank_and_no_more(per_rank):
    needed: Counter[Slot] = Counter()
    for order in per_rank:
        needed |= Counter(order)
    assert Counter(merge_orders(per_rank)) == needed


@given(orders)
def test_the_first_ranks_order_is_kept(per_rank):
    merged = iter(merge_orders(per_rank))
    assert all(slot in merged for slot in per_rank[0])  # a subsequence


def test_equal_orders_merge_to_themselves():
    assert merge_orders([gathers("abca")] * 3) == gathers("abca")


def test_what_only_a_later_rank_has_goes_behind_its_predecessor():
    assert merge_orders([gathers("ace"), gathers("abce"), gathers("acde")]) == gathers("abcde")
    assert merge_orders([gathers("bc"), gathers("abc")]) == gathers("abc")


@given(st.lists(slots, max_size=8), st.lists(slots, max_size=8))
def test_fingerprints_tell_orders_apart_and_fit_an_int64(one, other):
    assert (fingerprint(one) == fingerprint(other)) == (one == other)
    assert 0 <= fingerprint(one) < 2**63


def test_fingerprints_do_not_run_names_together():
    assert fingerprint(gathers(["ab", "c"])) != fingerprint(gathers(["a", "bc"]))


def test_only_reductions_lose_something_when_a_rank_is_absent():
    assert [name for name in Collective if name.contributes] == ["reduce-scatter", "all-reduce"]
