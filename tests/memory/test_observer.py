"""What an observer of the manager is told, held against the ledger."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from patrickstar.memory import (
    Access,
    Chunk,
    ChunkManager,
    CpuTier,
    DiskTier,
    Lru,
    Spool,
    Use,
    Why,
)

KIB = 1024


class Books:
    """Keeps its own books from what it hears."""

    def __init__(self) -> None:
        self.chunks = [0, 0]
        self.others = [0, 0]
        self.reasons: list[tuple[int, int, Why]] = []
        self.moves: list[tuple[int, int, int, float, float]] = []
        self.waits: list[tuple[float, float]] = []
        self.uses: list[tuple[Use, ...]] = []

    def moment(self, uses: Sequence[Use]) -> None:
        self.uses.append(tuple(uses))

    def placed(self, chunk: Chunk, tier: int) -> None:
        self.chunks[tier] += chunk.nbytes

    def left(self, chunk: Chunk, tier: int, why: Why) -> None:
        self.chunks[tier] -= chunk.nbytes
        self.reasons.append((chunk.id, tier, why))

    def moved(self, chunk: Chunk, source: int, target: int, began: float, ended: float) -> None:
        self.moves.append((chunk.nbytes, source, target, began, ended))

    def mended(self, copies: Sequence[tuple[Chunk, int]]) -> None:
        self.chunks = [sum(c.nbytes for c, at in copies if at == tier) for tier in (0, 1)]

    def waited(self, began: float, ended: float) -> None:
        self.waits.append((began, ended))

    def other(self, tier: int, nbytes: int) -> None:
        self.others[tier] = nbytes


def watched(folder: Path, books: Books, host: int = 64 * KIB) -> ChunkManager:
    tiers = [CpuTier("host", host), DiskTier("disk", Spool(folder))]
    return ChunkManager(tiers, policy=Lru(), observer=books)


@pytest.mark.parametrize("seed", range(4))
def test_books_kept_from_what_is_heard_equal_the_ledger(tmp_path: Path, seed: int) -> None:
    books = Books()
    manager = watched(tmp_path, books)
    rng = random.Random(seed)
    chunks = [manager.create(16 * KIB // 4, torch.float32) for _ in range(8)]
    for _ in range(150):
        what = rng.random()
        chunk = rng.choice(chunks)
        if what < 0.6:
            access = rng.choice([Access.UPDATE, Access.OVERWRITE, Access.READ])
            with manager.use([Use(chunk.id, access)]):
                pass
        elif what < 0.7:
            manager.release(chunk)
        elif what < 0.8:
            manager.evict(chunk)
        elif what < 0.9:
            manager.prefetch(chunk)
        else:
            manager.set_other(0, rng.randrange(0, 17 * KIB, KIB))
        for tier, account in enumerate(manager.ledger.tiers):
            assert books.chunks[tier] == account.chunks
            assert books.others[tier] == account.other
    manager.settle()
    heard: dict[str, int] = {}
    for nbytes, source, target, began, ended in books.moves:
        assert began <= ended
        way = f"{manager.tiers[source].name}->{manager.tiers[target].name}"
        heard[way] = heard.get(way, 0) + nbytes
    assert heard == manager.report().moved
    assert all(began <= ended for began, ended in books.waits)
    manager.close()


def test_after_an_interruption_the_observer_hears_what_is_left(tmp_path: Path) -> None:
    books = Books()
    manager = watched(tmp_path, books, host=32 * KIB)
    chunks = [manager.create(16 * KIB // 4, torch.float32) for _ in range(4)]
    for chunk in chunks:
        with manager.use([Use(chunk.id, Access.OVERWRITE)]):
            pass
    start = manager._residency._threads.start

    def interrupted(*arguments: Any) -> None:
        manager._residency._threads.start = start  # type: ignore[method-assign]
        raise KeyboardInterrupt

    manager._residency._threads.start = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        manager.access([Use(chunks[0].id, Access.READ)])
    manager.access([Use(chunks[1].id, Access.READ)])
    manager.settle()
    for tier, account in enumerate(manager.ledger.tiers):
        assert books.chunks[tier] == account.chunks
    manager.close()


def test_each_departure_has_its_reason(tmp_path: Path) -> None:
    books = Books()
    manager = watched(tmp_path, books, host=32 * KIB)
    a, b, c = (manager.create(16 * KIB // 4, torch.float32) for _ in range(3))
    for chunk in (a, b, c):  # the third needs the room of the first
        with manager.use([Use(chunk.id, Access.OVERWRITE)]):
            pass
    manager.evict(b)
    with manager.use([Use(b.id, Access.UPDATE)]):  # the copy on disk is stale now
        pass
    manager.release(c)
    assert (a.id, 0, Why.ROOM) in books.reasons
    assert (b.id, 0, Why.ASKED) in books.reasons
    assert (b.id, 1, Why.WRITTEN) in books.reasons
    assert (c.id, 0, Why.RELEASED) in books.reasons
    assert books.waits, "the third chunk had to wait for the first to leave"
    manager.close()


def test_a_planned_departure_says_so_and_moments_are_sets_of_uses(tmp_path: Path) -> None:
    books = Books()
    manager = watched(tmp_path, books, host=32 * KIB)
    chunks = [manager.create(16 * KIB // 4, torch.float32) for _ in range(4)]
    for _ in range(4):
        manager.begin_iteration("same")
        for chunk in chunks:
            for _ in range(2):
                with manager.use([Use(chunk.id, Access.UPDATE)]):
                    pass
        manager.end_iteration()
    assert len(books.uses) == 16, "the same use twice is one moment"
    assert any(why is Why.PLAN for _, tier, why in books.reasons if tier == 0)
    manager.close()
