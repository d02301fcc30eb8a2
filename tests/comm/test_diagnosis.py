"""Verdicts from what ranks published, without processes."""

from __future__ import annotations

from patrickstar.comm.call import Kind
from patrickstar.comm.diagnosis import (
    PATIENT_BEATS,
    Report,
    Stumble,
    Verdict,
    early_verdict,
    final_verdict,
)
from patrickstar.comm.progress import Mark

MINE = Mark(5, 111, "all-gather of chunk 'c5'", True)


def at(seq: int, tag: int = 111, label: str = "something", **more: object) -> Report:
    marks = {Kind.DATA: Mark(seq, tag, label), Kind.CONTROL: Mark()}
    return Report(marks=marks, **more)


def early(others: dict[int, Report]) -> Verdict | None:
    return early_verdict(0, Kind.DATA, MINE, others)


def final(others: dict[int, Report]) -> Verdict:
    return final_verdict(0, Kind.DATA, MINE, others, "timed out")


def test_ranks_at_the_same_call_or_behind_or_silent_are_no_evidence_before_the_time_is_up():
    assert early({1: at(5), 2: at(3), 3: at(5, silent=True), 4: at(6, tag=7)}) is None


def test_the_verdict_of_a_rank_that_failed_is_believed():
    cause = Verdict((9,), "rank 9 gave no sign of life")
    assert early({1: at(2), 2: at(5, status="failed", verdict=cause)}) == cause


def test_a_rank_that_left_before_this_call_is_to_blame_one_that_left_after_it_is_not():
    verdict = early({1: at(4, status="left"), 2: at(5, status="left")})
    assert verdict is not None and verdict.ranks == (1,)
    assert early({2: at(5, status="left")}) is None


def test_a_rank_that_raised_and_began_nothing_since_is_to_blame_after_a_while():
    short, long = (Stumble("KeyError: 'x'", PATIENT_BEATS + more) for more in (-1, 1))
    assert early({1: at(4, stumble=short)}) is None
    assert early({1: at(5, stumble=long)}) is None, "it has come"
    verdict = early({1: at(4, stumble=long)})
    assert verdict is not None and verdict.ranks == (1,) and "KeyError: 'x'" in verdict.reason


def test_of_ranks_that_disagree_the_minority_is_blamed_and_all_calls_are_listed():
    verdict = early({1: at(5), 2: at(5, tag=9, label="all-reduce of chunk 'x'")})
    assert verdict is not None and verdict.ranks == (2,)
    assert "rank 0 runs all-gather of chunk 'c5'" in verdict.reason
    assert "rank 2 runs all-reduce of chunk 'x'" in verdict.reason


def test_of_two_that_disagree_the_higher_rank_is_blamed_on_both():
    verdict = early({1: at(5, tag=9)})
    mirrored = early_verdict(1, Kind.DATA, Mark(5, 9, "x", True), {0: at(5)})
    assert verdict is not None and mirrored is not None
    assert verdict.ranks == mirrored.ranks == (1,)


def test_silent_ranks_are_blamed_before_ranks_that_are_behind_because_of_them():
    assert final({1: at(4), 2: at(4, silent=True)}).ranks == (2,)


def test_ranks_behind_are_named_with_the_last_they_did():
    verdict = final({1: at(5), 2: at(4, label="reduce-scatter of chunk 'c4'")})
    assert verdict.ranks == (2,)
    assert "reduce-scatter of chunk 'c4'" in verdict.reason and "timed out" in verdict.reason


def test_nobody_is_blamed_without_evidence():
    assert final({1: at(5), 2: at(6)}) == Verdict((), "timed out")


def test_the_control_sequence_is_judged_by_itself():
    others = {1: at(99)}
    assert final_verdict(0, Kind.CONTROL, Mark(1, 5, "barrier"), others, "late").ranks == (1,)
