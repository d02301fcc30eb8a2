"""What a run needs of its tiers, found from its trace."""

from __future__ import annotations

from patrickstar.engine.needs import enough_on_disk
from patrickstar.memory import Access, Moment, Trace, Use

PAGE = 4096
SIZES = dict.fromkeys(range(8), PAGE)


def trace_of(*moments: tuple[int, int]) -> Trace:
    """Moments that use one chunk on the device each, beside so many bytes that no chunk owns."""
    return Trace([Moment((Use(chunk, Access.READ, 0),), {0: other}) for chunk, other in moments])


def test_a_device_that_chunks_have_to_leave_once_may_be_empty_at_any_time() -> None:
    trace = trace_of(*((chunk, 0) for chunk in SIZES), (0, 3 * PAGE))
    # What the host lacks, and three chunks that are on their way.
    assert enough_on_disk(trace, SIZES, [8 * PAGE, 6 * PAGE]) == (8 - 6 + 3) * PAGE


def test_what_never_leaves_the_device_needs_no_disk() -> None:
    trace = trace_of(*((chunk, 0) for chunk in SIZES))
    assert enough_on_disk(trace, SIZES, [8 * PAGE, 0]) == 0


def test_unused_chunks_stay_where_memory_has_room_for_them() -> None:
    trace = trace_of((0, PAGE))
    assert enough_on_disk(trace, SIZES, [9 * PAGE]) == 0
    assert enough_on_disk(trace, SIZES, [8 * PAGE]) == (1 + 2) * PAGE
