"""Who leaves, by each policy."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.memory import (
    Access,
    Candidate,
    ChunkManager,
    CpuTier,
    DiskTier,
    Fifo,
    FurthestNextUse,
    Lru,
    Spool,
    Use,
)


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


@pytest.mark.parametrize("policy", [Fifo(), Lru(), FurthestNextUse()])
@given(
    facts=st.lists(
        st.tuples(st.booleans(), st.none() | st.integers(1, 5), st.booleans(), st.integers())
    )
)
def test_the_rank_is_the_order_in_which_chunks_would_be_chosen(
    policy: Fifo | Lru | FurthestNextUse, facts: list[tuple[bool, int | None, bool, int]]
) -> None:
    left = [
        candidate(number, dirty=dirty, next_use=next_use, reloads=reloads, loaded_at=loaded)
        for number, (dirty, next_use, reloads, loaded) in enumerate(facts)
    ]
    for ranked in list(policy.rank(left)):
        assert ranked == policy.choose(left)
        left.remove(ranked)
    assert not left


def test_room_is_made_without_looking_at_every_chunk(tmp_path: Path) -> None:
    """With thousands of chunks, each that is looked at costs every use some microseconds."""
    looked: list[int] = []

    class Watched(Lru):
        def rank(self, candidates: Iterable[Candidate]) -> Iterable[Candidate]:
            for each in candidates:
                looked.append(each.chunk)
                yield each

    tiers = [CpuTier("host", 50 * 4096), DiskTier("disk", Spool(str(tmp_path)))]
    with closing(ChunkManager(tiers, policy=Watched(), plan=False)) as manager:
        chunks = [manager.create(1024, torch.float32) for _ in range(100)]
        for chunk in chunks:
            with manager.use([Use(chunk.id, Access.UPDATE)]):
                pass
        manager.set_other(0, 10 * 4096)
    assert looked == [chunk.id for chunk in chunks[:60]]
