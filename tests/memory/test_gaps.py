"""What is a choice, what it costs, and what is none."""

from __future__ import annotations

from patrickstar.memory import Moment, Use
from patrickstar.memory.gaps import Gaps, find_gaps
from tests.memory.traces import OVERWRITE, READ, UPDATE

SIZES = {1: 10, 2: 20}
Cell = tuple[int, object]


def gaps(*moments: Moment, tier: int = 0) -> Gaps:
    return find_gaps(tier, [moment.uses for moment in moments], moments, SIZES)


def moment(*uses: Use, blanked: tuple[int, ...] = (), other: int = 0) -> Moment:
    return Moment(uses, {0: other}, blanked)


IDLE = moment()
SPANS = ("start", "end", "reads", "episode")


def spans(found: Gaps) -> list[tuple[object, ...]]:
    return [tuple(getattr(gap, name) for name in SPANS) for gap in found.gaps]


def test_a_chunk_that_is_only_read_has_a_gap_between_uses_and_one_around() -> None:
    found = gaps(moment(Use(1, READ)), IDLE, IDLE, moment(Use(1, READ)), IDLE)
    assert sorted(spans(found)) == [(0, 3, True, None), (3, 5, True, None)]
    assert found.loads == []
    assert found.episodes == []


def test_a_single_use_has_a_gap_all_the_way_round() -> None:
    assert spans(gaps(IDLE, moment(Use(1, READ)), IDLE)) == [(1, 4, True, None)]


def test_uses_in_a_row_have_no_gap() -> None:
    assert spans(gaps(moment(Use(1, READ)), moment(Use(1, UPDATE)))) == []


def test_all_gaps_after_a_write_share_one_save() -> None:
    found = gaps(
        moment(Use(1, UPDATE)), IDLE, moment(Use(1, READ)), IDLE, moment(Use(1, READ)), IDLE
    )
    assert sorted(spans(found)) == [(0, 2, True, 0), (2, 4, True, 0), (4, 6, True, 0)]
    assert [(e.chunk, e.nbytes, e.written, e.forced) for e in found.episodes] == [(1, 10, 0, None)]


def test_every_write_begins_an_episode() -> None:
    found = gaps(moment(Use(1, UPDATE)), IDLE, moment(Use(1, OVERWRITE)), IDLE)
    assert {(gap.start, gap.end, gap.reads) for gap in found.gaps} == {(0, 2, False), (2, 4, True)}
    written = {gap.start: found.episodes[gap.episode or 0].written for gap in found.gaps}
    assert written == {0: 0, 2: 2}


def test_contents_that_die_leave_no_reason_to_come_back() -> None:
    found = gaps(moment(Use(1, OVERWRITE)), IDLE, moment(Use(1, READ), blanked=(1,)), IDLE, IDLE)
    assert spans(found) == [(0, 2, True, 0)]
    assert found.loads == []


def test_contents_take_room_until_they_die() -> None:
    found = gaps(moment(Use(1, OVERWRITE)), IDLE, moment(blanked=(1,)), IDLE)
    assert spans(found) == [(0, 3, False, 0)]


def test_a_blank_chunk_that_is_read_is_made_and_not_loaded() -> None:
    found = gaps(moment(Use(1, READ)), IDLE, moment(Use(1, READ), blanked=(1,)), IDLE)
    assert spans(found) == [(0, 2, True, 0)]
    assert found.loads == []


def test_what_a_slower_tier_reads_is_saved_in_any_case() -> None:
    found = gaps(
        moment(Use(1, UPDATE)), IDLE, moment(Use(1, READ, tier=1)), IDLE, moment(Use(1, READ)), IDLE
    )
    assert [(e.written, e.forced) for e in found.episodes] == [(0, 2)]
    assert sorted(spans(found)) == [(0, 4, True, None), (4, 6, True, None)]


def test_what_a_slower_tier_writes_has_to_come_back() -> None:
    found = gaps(moment(Use(1, READ)), IDLE, moment(Use(1, UPDATE, tier=1)), IDLE)
    assert [(load.chunk, load.start, load.end) for load in found.loads] == [(1, -1, 0)]
    assert spans(found) == [(0, 2, False, None)], "until then it may as well leave"


def test_what_a_faster_tier_writes_is_not_here_any_more() -> None:
    moments = (
        moment(Use(1, READ, tier=1)),
        IDLE,
        moment(Use(1, UPDATE)),
        moment(Use(1, OVERWRITE, tier=1)),
        IDLE,
    )
    found = gaps(*moments, tier=1)
    assert {(gap.start, gap.end) for gap in found.gaps} == {(0, 2), (3, 5)}
    assert found.loads == []


def test_what_is_needed_counts_every_chunk_once_with_memory_that_no_chunk_owns() -> None:
    now = moment(Use(1, READ), Use(1, UPDATE), Use(2, READ), other=5)
    assert gaps(now, IDLE).needed == [35, 0]
    assert gaps(now, IDLE).smallest == 35


def test_what_could_not_have_left_is_needed_too() -> None:
    held = Moment((Use(2, READ),), held={0: (1,)})
    found = gaps(moment(Use(1, READ)), held, IDLE)
    assert found.needed == [10, 30, 0]
    assert {(gap.chunk, gap.start, gap.end) for gap in found.gaps} == {(1, 1, 3), (2, 1, 4)}


def test_the_capacity_for_everything_counts_what_lies_around_the_end() -> None:
    found = gaps(moment(Use(1, READ)), moment(Use(2, READ), other=3), IDLE)
    assert found.everything == 33
