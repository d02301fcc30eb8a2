"""Tags: the envelope that keeps calls which differ from ever exchanging a byte."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from patrickstar.comm.call import Call, Kind, Place, Turn

calls = st.builds(
    Call,
    st.sampled_from(Kind),
    st.integers(1, 10**6),
    st.sampled_from(["all-gather", "all-reduce"]),
    st.text(max_size=8),
    st.integers(0, 10**9),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["", "owner 1"]),
)


@given(calls)
def test_a_tag_is_a_positive_31_bit_number_that_equal_calls_share(call):
    assert 0 <= call.tag < 2**31
    assert call.tag == Call(*vars(call).values()).tag


@given(calls, st.integers(1, 2047))
def test_calls_less_than_2048_places_apart_never_share_a_tag(call, distance):
    later = Call(call.kind, call.seq + distance, *list(vars(call).values())[2:])
    assert call.tag != later.tag


@given(calls)
def test_control_and_data_never_share_a_tag(call):
    other = Kind.DATA if call.kind is Kind.CONTROL else Kind.CONTROL
    assert call.tag != Call(other, *list(vars(call).values())[1:]).tag


def test_everything_that_ranks_must_agree_on_changes_the_tag():
    base = Call(Kind.DATA, 7, "all-gather", "c1", 12, "float32", "sharded")
    others = [
        Call(Kind.DATA, 7, "all-reduce", "c1", 12, "float32", "sharded"),
        Call(Kind.DATA, 7, "all-gather", "c2", 12, "float32", "sharded"),
        Call(Kind.DATA, 7, "all-gather", "c1", 13, "float32", "sharded"),
        Call(Kind.DATA, 7, "all-gather", "c1", 12, "bfloat16", "sharded"),
        Call(Kind.DATA, 7, "all-gather", "c1", 12, "float32", "owner 1"),
    ]
    assert len({call.tag for call in [base, *others]}) == 6


def test_a_place_counts_from_one_and_a_call_reads_well():
    place = Place(Kind.DATA)
    first, second = (place.next("all-gather", "c1", 12, "float32", "sharded") for _ in range(2))
    assert (first.seq, second.seq) == (1, 2)
    assert str(second) == "all-gather of chunk 'c1' (12 x float32, sharded, #2)"


def test_a_turn_never_has_no_time_left_since_zero_means_forever_to_some():
    turn = Turn.start(Place(Kind.DATA).next("all-gather", "c", 1, "float32"), 0.01)
    time.sleep(0.02)
    assert turn.left() == 0.001
