"""Ranks that were launched find each other, whoever used the launcher's store before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from patrickstar.comm import CommError
from patrickstar.engine.rendezvous import fresh


def meet(store: dist.Store, size: int, late: int) -> list[set[bytes]]:
    """What each rank finds when all have left their number and looked at those of all.

    Args:
        late: the rank that comes when the others are there.
    """

    def one(rank: int) -> set[bytes]:
        own = fresh(store, rank, size, 10.0)
        assert not own.check([str(rank)]), "somebody was here before"
        own.set(str(rank), f"{rank}")
        return {own.get(str(other)) for other in range(size)}

    with ThreadPoolExecutor(size) as pool:
        asked = {rank: pool.submit(one, rank) for rank in range(size) if rank != late}
        asked[late] = pool.submit(one, late)
        return [asked[rank].result(20) for rank in range(size)]


@pytest.mark.parametrize("late", [0, 2])
def test_ranks_that_come_again_meet_each_other_and_not_what_was_there_before(late: int) -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    for _ in range(3):
        assert meet(store, 3, late) == [{b"0", b"1", b"2"}] * 3


def test_an_attempt_that_ended_while_ranks_met_is_no_hindrance() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(3) as pool:
        begun = [pool.submit(fresh, store, rank, 3, 0.3) for rank in (0, 1)]
        for attempt in begun:  # the third had been killed; what two have left stays in the store
            attempt.exception(20)
    assert meet(store, 3, 0) == [{b"0", b"1", b"2"}] * 3


@pytest.mark.parametrize(("comes", "lacks"), [(0, 1), (1, 0)])
def test_a_rank_that_does_not_come_is_named(comes: int, lacks: int) -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(CommError, match=f"rank {lacks} did not come"):
        fresh(store, comes, 2, 0.1)
