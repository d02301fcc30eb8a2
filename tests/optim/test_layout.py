from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.optim import Layout, Segment

SHAPES = st.lists(st.tuples(st.integers(1, 50)), min_size=1, max_size=8)


def scalar_elements(layout: Layout, numel: int, lanes: int) -> set[int]:
    """What `tails` says, as indices: the elements that need the scalar path."""
    native, rest = layout.tails(numel, lanes)
    found = set() if rest is None else set(rest.index.tolist())
    if native and numel % lanes:
        found |= set(range(numel - numel % lanes, numel))
    return found


@given(shapes=SHAPES, lanes=st.sampled_from([2, 4, 8, 16]), align=st.sampled_from([1, 8, 16]))
def test_the_tail_of_every_tensor_and_nothing_else_needs_the_scalar_path(
    shapes: Any, lanes: int, align: int
) -> None:
    layout = Layout.of_shapes(shapes, align=align)
    want = set()
    for seg in layout.segments:
        want |= set(range(seg.stop - seg.tensor_numel % lanes, seg.stop))
    assert scalar_elements(layout, layout.numel, lanes) == want


@given(shapes=SHAPES, lanes=st.sampled_from([4, 8]), data=st.data())
def test_a_cut_layout_marks_the_same_elements(shapes: Any, lanes: int, data: Any) -> None:
    layout = Layout.of_shapes(shapes)
    start = data.draw(st.integers(0, layout.numel - 1))
    stop = data.draw(st.integers(start + 1, layout.numel))
    whole = scalar_elements(layout, layout.numel, lanes)
    cut = scalar_elements(layout.cut(start, stop), stop - start, lanes)
    assert {i + start for i in cut} == {i for i in whole if start <= i < stop}


def test_tensors_of_whole_vectors_need_nothing() -> None:
    layout = Layout.of_shapes([(64,), (3, 16), (8,)])
    assert layout.tails(layout.numel, 8) == (True, None)


def test_padding_keeps_tensors_at_aligned_places() -> None:
    layout = Layout.of_shapes([(5,), (2, 3), (1,)], align=16)
    assert [seg.start for seg in layout.segments] == [0, 16, 32]
    assert [seg.key for seg in layout.segments] == [0, 1, 2]
    assert layout.numel == 33


def test_a_piece_knows_its_place_in_the_whole_tensor() -> None:
    piece = Layout.of_shapes([(4, 5), (7,)]).cut(8, 23).segments
    assert (piece[0].offset, piece[0].numel, piece[0].whole) == (8, 12, False)
    assert (piece[1].start, piece[1].offset, piece[1].numel) == (12, 0, 3)
    assert Segment(0, (4, 5)).whole


@pytest.mark.parametrize(
    "segments", [(Segment(0, (4,)), Segment(3, (4,))), (Segment(0, (4,), offset=2, length=3),)]
)
def test_segments_that_overlap_or_leave_their_tensor_are_refused(segments: Any) -> None:
    with pytest.raises(AssertionError):
        Layout(segments)
