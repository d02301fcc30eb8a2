"""Who leaves, by each policy."""

from __future__ import annotations

from patrickstar.memory import Candidate, Fifo, FurthestNextUse, Lru


def candidate(chunk: int, **facts: object) -> Candidate:
    given: dict[str, object] = {"nbytes": 10, "dirty": False, "loaded_at": chunk, "used_at": chunk}
    return Candidate(chunk, **(given | facts))  # type: ignore[arg-type]


def test_first_in_is_first_out() -> None:
    candidates = [candidate(1, loaded_at=5), candidate(2, loaded_at=3), candidate(3, loaded_at=9)]
    assert Fifo().choose(candidates).chunk == 2


def test_the_least_recently_used_leaves() -> None:
    candidates = [candidate(1, used_at=5), candidate(2, used_at=3), candidate(3, used_at=9)]
    assert Lru().choose(candidates).chunk == 2


def test_of_equal_chunks_the_furthest_next_use_leaves() -> None:
    candidates = [candidate(1, next_use=5), candidate(2, next_use=30), candidate(3, next_use=9)]
    assert FurthestNextUse().choose(candidates).chunk == 2


def test_a_chunk_that_is_never_used_again_leaves_before_any_other() -> None:
    candidates = [candidate(1, next_use=500), candidate(2, next_use=None), candidate(3, next_use=9)]
    assert FurthestNextUse().choose(candidates).chunk == 2


def test_saving_and_coming_back_are_weighed_against_the_time_away() -> None:
    clean, dirty = candidate(1, next_use=20), candidate(2, next_use=30, dirty=True)
    assert FurthestNextUse().choose([clean, dirty]).chunk == 1, "20 / 1 move beats 30 / 2"
    dirty = candidate(2, next_use=50, dirty=True)
    assert FurthestNextUse().choose([clean, dirty]).chunk == 2


def test_a_chunk_that_costs_nothing_to_lose_leaves_first() -> None:
    candidates = [candidate(1, next_use=500), candidate(2, next_use=3, reloads=False)]
    assert FurthestNextUse().choose(candidates).chunk == 2


def test_without_a_future_the_past_decides() -> None:
    candidates = [candidate(1, used_at=5), candidate(2, used_at=3), candidate(3, used_at=9)]
    assert FurthestNextUse().choose(candidates).chunk == 2
