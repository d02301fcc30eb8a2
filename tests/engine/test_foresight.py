"""What is given up and what comes ahead: as few bytes as can be, and never more than in theory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.engine.foresight import Foresight
from patrickstar.engine.gather_room import gathered_bytes, least_room, once_a_pass
from patrickstar.engine.use_order import Group, Order

Passes = Sequence[Sequence[Group]]
LAYERS = [(number,) for number in range(8)]
FORWARD_AND_BACK: Passes = [LAYERS, LAYERS[::-1]]
TIED: Passes = [[(9,), *LAYERS, (9,)], [(9,), *LAYERS[::-1]]]
BLOCKS = [LAYERS[start : start + 3] for start in (5, 2)] + [LAYERS[:2]]
RECOMPUTED: Passes = [LAYERS, [group for block in BLOCKS for group in (*block, *block[::-1])]]
WITH_NORMS: Passes = [
    [step for layer in LAYERS for step in ((7,), (*layer, 7))],
    [step for layer in LAYERS[::-1] for step in (layer, (7,))],
]


def as_order(passes: Passes) -> Order:
    order = Order()
    for groups in passes:
        order.passes.append(len(order.groups))
        for group in groups:
            if not order.groups or order.groups[-1] != group:
                order.add(group)
    return order


def gathered(foresight: Foresight, passes: Passes, sizes: dict[int, int]) -> tuple[int, int]:
    """Bytes that one iteration gathers, and how many of its gathers came ahead."""
    foresight.begin("training")
    there: list[int] = []
    total = ahead = 0
    for groups in passes:
        foresight.begin_pass()
        for group in groups:
            foresight.used(group)
            for chunk in group:
                if chunk in there:
                    continue
                free = [other for other in there if other not in group]
                if foresight.foreseen:
                    gone = foresight.victims(chunk, there, free)
                else:
                    gone = free[: max(len(there) - 1, 0)]
                there = [other for other in there if other not in gone] + [chunk]
                total += sizes[chunk]
                foresight.held(there)
            while foresight.foreseen:
                free = [other for other in there if other not in group]
                found = foresight.ahead(there, free)
                if found is None:
                    break
                there = [other for other in there if other not in found[1]] + [found[0]]
                total += sizes[found[0]]
                ahead += 1
                assert sum(sizes[other] for other in there) <= foresight.room.granted
    foresight.end(complete=True, ahead=max(sizes.values()), extra=1 << 30)
    return total, ahead


@pytest.mark.parametrize("passes", [FORWARD_AND_BACK, TIED, RECOMPUTED, WITH_NORMS])
def test_each_pass_gathers_a_chunk_at_most_once_from_the_second_iteration_on(
    passes: Passes,
) -> None:
    sizes = dict.fromkeys(range(10), 100)
    theory, foresight = once_a_pass(as_order(passes), sizes), Foresight(sizes)
    first, _ = gathered(foresight, passes, sizes)
    second, ahead = gathered(foresight, passes, sizes)
    assert second <= theory and second <= first
    # All but the first come ahead.
    assert second - ahead * 100 == sum(sizes[chunk] for chunk in passes[0][0])


def test_the_least_room_is_the_least() -> None:
    sizes = dict.fromkeys(range(10), 100)
    assert least_room(as_order(FORWARD_AND_BACK), sizes) == 200
    for passes in (TIED, RECOMPUTED):
        order = as_order(passes)
        room, theory = least_room(order, sizes), once_a_pass(order, sizes)
        assert gathered_bytes(order, sizes, room) <= theory
        assert gathered_bytes(order, sizes, room - 100) > theory


@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=12), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=7, max_size=7),
)
def test_what_comes_ahead_costs_nothing(chunks: list[list[int]], lengths: list[int]) -> None:
    passes = [[(chunk,) for chunk in one] for one in chunks]
    sizes, foresight = dict(enumerate(lengths)), Foresight(dict(enumerate(lengths)))
    gathered(foresight, passes, sizes)
    foresight.begin("training")
    room = foresight.room.granted
    total, _ = gathered(foresight, passes, sizes)
    if len(set(lengths)) == 1:  # of unlike chunks no rule that is quick gives up the best
        assert total <= gathered_bytes(as_order(passes), sizes, room)


def test_without_more_room_the_second_iteration_has_what_the_first_was_granted() -> None:
    sizes = dict.fromkeys(range(8), 100)
    foresight = Foresight(sizes)
    foresight.begin("training")
    for groups in FORWARD_AND_BACK:
        foresight.begin_pass()
        for group in groups:
            foresight.used(group)
            foresight.held([0, 1])
    foresight.end(complete=True, ahead=100, extra=0)
    assert foresight.begin("training")
    assert (foresight.room.floor, foresight.room.granted, foresight.room.depth) == (300, 300, 1)
