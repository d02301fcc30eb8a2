"""Tensors keep their order, never overlap and start where kernels like it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from patrickstar.memory.layout import ALIGN, choose_limit, pack

NUMELS = st.lists(st.integers(1, 5000), max_size=40)


@given(numels=NUMELS, limit=st.integers(1, 8000))
def test_every_tensor_has_a_place_of_its_own(numels: list[int], limit: int) -> None:
    layout = pack(numels, limit)
    assert len(layout.placements) == len(numels)
    places = [(p.chunk, p.offset, n) for p, n in zip(layout.placements, numels, strict=True)]
    assert places == sorted(places, key=lambda place: place[:2]), "in order"
    for (chunk, offset, numel), (next_chunk, next_offset, _) in pairwise(places):
        assert next_chunk > chunk or next_offset >= offset + numel
    for chunk, offset, numel in places:
        assert offset % ALIGN == 0
        assert offset + numel <= layout.lengths[chunk]
    assert layout.used == sum(numels)
    assert 0 < layout.utilisation <= 1


@given(numels=NUMELS, limit=st.integers(ALIGN, 8000))
def test_a_chunk_is_longer_than_the_limit_only_for_one_long_tensor(
    numels: list[int], limit: int
) -> None:
    layout = pack(numels, limit)
    for chunk, length in enumerate(layout.lengths):
        inside = [n for p, n in zip(layout.placements, numels, strict=True) if p.chunk == chunk]
        assert inside, "no chunk is empty"
        if length > limit:
            assert len(inside) == 1


@given(numels=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=30), share=st.integers(1, 100))
def test_the_chosen_length_respects_the_budget_and_is_deterministic(
    numels: list[int], share: int
) -> None:
    budget = sum(numels) * 16 * share // 100
    limit = choose_limit(numels, 16, budget)
    assert limit == choose_limit(numels, 16, budget)
    assert limit >= ALIGN
    assert limit <= max(1 << 16, budget // (12 * 16))


def test_without_tensors_there_is_a_length_all_the_same() -> None:
    assert choose_limit([], 16, None) > 0
    assert pack([], 100).lengths == []
    assert pack([], 100).utilisation == 1.0
