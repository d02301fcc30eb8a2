"""Runs that follow their trace, leave it and find it again."""

from __future__ import annotations

from patrickstar.memory import Access, FurthestNextUse, Moment, Trace, Use, make_plan
from patrickstar.memory.iterations import MOST_PLANS, Iterations
from patrickstar.memory.planner import Action
from patrickstar.memory.playback import Playback

SIZES = dict.fromkeys(range(20), 10)


def there_and_back(chunks: int = 12, capacity: int | None = 40) -> Playback:
    """Chunks read in order and in reverse."""
    order = [*range(chunks), *reversed(range(chunks))]
    moments = [Moment((Use(c, Access.READ),), {0: n}) for n, c in enumerate(order)]
    trace = Trace(moments, [(0, "there"), (chunks, "back")])
    return Playback(make_plan(trace, SIZES, [capacity, None], FurthestNextUse()))


def use(chunk: int) -> tuple[Use, ...]:
    return (Use(chunk, Access.READ),)


def test_a_run_that_follows_its_trace_gets_every_action_once() -> None:
    playback = there_and_back()
    done: list[Action] = []
    for moment in playback.plan.trace.moments:
        done += playback.moment(moment.uses)
    assert done == [action for actions in playback.plan.actions for action in actions]
    assert not playback.strayed
    playback.restart()
    assert playback.moment(use(0)) == playback.plan.actions[0]


def test_a_moment_is_calm_when_it_comes_next_and_the_plan_does_nothing_there() -> None:
    playback = there_and_back(capacity=None)
    assert playback.calm(use(1)) == -1
    assert playback.calm(use(0)) == 0
    playback.moment(use(0))
    assert playback.calm(use(1)) == 1
    assert playback.others(1) == (1,)
    tight = there_and_back(capacity=40)
    moments, actions = tight.plan.trace.moments, tight.plan.actions
    for index, moment in enumerate(moments):
        assert (tight.calm(moment.uses) == index) is not bool(actions[index])
        tight.moment(moment.uses)


def test_memory_of_a_moment_is_known_until_the_run_strays() -> None:
    playback = there_and_back()
    assert playback.other(0) == 0
    playback.moment(use(0))
    playback.moment(use(1))
    assert playback.other(0) == 1
    playback.moment((Use(19, Access.READ),))
    assert playback.strayed
    assert playback.other(0) == playback.plan.trace.peak_other(0) == 23


def test_a_run_that_strayed_assumes_the_most_of_its_segment_alone() -> None:
    playback = there_and_back()
    assert playback.segment("there")
    playback.moment((Use(19, Access.READ),))
    assert playback.other(0) == 11
    assert playback.segment("back")
    assert playback.other(0) == 23
    playback.moment(use(11))  # as the segment begins in the trace, so it is found at once
    assert playback.position == 12
    assert playback.other_here(0) == 12


def test_a_dropped_layer_is_passed_over_at_once() -> None:
    playback = there_and_back()
    playback.moment(use(0))
    actions = playback.moment(use(3))
    assert playback.position == 3
    assert playback.strayed
    assert all(a.kind != "load" or a.chunk not in (1, 2) for a in actions), "nobody needs these"


def test_a_chunk_used_once_more_is_not_taken_for_its_next_use_far_away() -> None:
    playback = there_and_back()
    for chunk in (0, 1, 0, 2):
        playback.moment(use(chunk))
    assert playback.position == 2
    playback.moment(use(3))
    assert playback.position == 3


def test_a_long_jump_is_believed_when_the_next_moment_agrees() -> None:
    playback = there_and_back()
    playback.moment(use(10))
    assert playback.position == -1
    playback.moment(use(11))
    assert playback.position == 11


def test_moments_of_its_own_leave_a_run_where_it_is() -> None:
    playback = there_and_back()
    playback.moment(use(0))
    assert playback.moment((Use(18, Access.READ),)) == []
    assert playback.position == 0
    assert playback.moment(use(1)) == playback.plan.actions[1]


def test_the_next_use_goes_round_at_the_end() -> None:
    playback = there_and_back(4, None)
    assert playback.next_use(2, 0) == (3, True)
    for chunk in (0, 1, 2, 3, 3, 2, 1):
        playback.moment(use(chunk))
    assert playback.next_use(0, 0) == (1, True)
    assert playback.next_use(3, 0) == (5, True)
    assert playback.next_use(17, 0) == (None, True)


def test_segments_are_those_of_the_trace_in_order() -> None:
    playback = there_and_back()
    assert playback.segment("there")
    for chunk in range(12):
        playback.moment(use(chunk))
    assert playback.segment("back")
    assert not playback.segment("again")
    playback.restart()
    assert not playback.segment("back")


def test_plans_are_kept_to_a_number_the_one_used_last_longest() -> None:
    iterations = Iterations(FurthestNextUse(), plan=True, prefetch=True)
    for key in range(MOST_PLANS + 5):
        iterations.begin("first")
        iterations.plan(
            key if key else "first", Trace([Moment((Use(0, Access.READ),))]), {0: 8}, [8, None]
        )
    assert len(iterations.plans) == MOST_PLANS
    assert "first" in iterations.plans and MOST_PLANS + 4 in iterations.plans
