"""Work that is put off until chunks are used next."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from patrickstar.errors import BudgetError
from patrickstar.memory import Access, Chunk, ChunkManager, CpuTier, DiskTier, Due, Spool, Use
from tests.interrupts import interrupted_at

KIB = 1 << 10
LENGTH = 4 * KIB  # fp32: 16 KiB


def manager_with(folder: Path, chunks: int, room: int) -> tuple[ChunkManager, list[Chunk]]:
    tiers = [CpuTier("host", room * 16 * KIB), DiskTier("disk", Spool(folder))]
    manager = ChunkManager(tiers)
    made = [manager.create(LENGTH, torch.float32) for _ in range(chunks)]
    for number, chunk in enumerate(made):
        with manager.use([Use(chunk.id, Access.OVERWRITE)]):
            manager.tensor(chunk).fill_(number)
    return manager, made


def due_for(manager: ChunkManager, chunks: list[Chunk], dead: int = 0) -> Due:
    """Adds the last chunk to the first; the last `dead` are not needed afterwards."""

    def work() -> None:
        manager.tensor(chunks[0]).add_(manager.tensor(chunks[-1]))

    uses = (Use(chunks[0].id, Access.UPDATE), *(Use(c.id, Access.READ) for c in chunks[1:]))
    gone = tuple(chunk.id for chunk in chunks[len(chunks) - dead :])
    return Due(tuple(chunk.id for chunk in chunks), uses, work, dead=gone)


def first(manager: ChunkManager, chunk: Chunk) -> float:
    with manager.use([Use(chunk.id, Access.READ)]):
        return float(manager.tensor(chunk)[0])


@pytest.mark.parametrize(
    "look",
    [
        lambda manager, chunk: manager.access([Use(chunk.id, Access.READ)]),
        lambda manager, chunk: manager.use([Use(chunk.id, Access.READ)]).__enter__(),
        lambda manager, chunk: manager.do_due(),
        lambda manager, chunk: manager.do_due([chunk.id]),
    ],
    ids=["access", "use", "all", "of the chunk"],
)
def test_work_is_done_before_its_chunk_is_given_out(
    look: Callable[[ChunkManager, Chunk], object], tmp_path: Path
) -> None:
    manager, chunks = manager_with(tmp_path, 3, 3)
    manager.before_next_use(due_for(manager, chunks[1:]))
    assert first(manager, chunks[0]) == 0  # another chunk's use does nothing
    assert manager.has_due() and manager.is_due(chunks[1])
    look(manager, chunks[1])
    assert float(manager.tensor(chunks[1])[0]) == 3
    assert not manager.has_due() and not manager.is_due(chunks[1])
    manager.close()


def test_work_is_done_once_and_its_dead_chunk_is_blank_afterwards(tmp_path: Path) -> None:
    manager, chunks = manager_with(tmp_path, 3, 3)
    manager.before_next_use(due_for(manager, chunks, dead=1))
    assert [first(manager, chunk) for chunk in chunks] == [2, 1, 0]
    assert first(manager, chunks[0]) == 2
    manager.close()


def test_chunks_with_work_due_move_like_any_other(tmp_path: Path) -> None:
    manager, chunks = manager_with(tmp_path, 8, 3)
    manager.before_next_use(due_for(manager, chunks[:2]))
    for chunk in chunks[:2]:
        if manager.ledger.is_valid(chunk.id, 0):
            manager.evict(chunk)
    assert manager.is_due(chunks[0])
    assert first(manager, chunks[1]) == 1
    assert first(manager, chunks[0]) == 1
    manager.close()


def test_work_that_finds_no_room_stays_due_and_changes_nothing(tmp_path: Path) -> None:
    manager, chunks = manager_with(tmp_path, 4, 4)
    manager.before_next_use(due_for(manager, chunks[:3]))
    manager.set_other(0, 32 * KIB)
    with pytest.raises(BudgetError):
        first(manager, chunks[0])
    assert manager.is_due(chunks[0])
    manager.set_other(0, 0)
    assert first(manager, chunks[0]) == 2
    manager.close()


def test_two_pieces_of_work_before_one_use_are_both_done(tmp_path: Path) -> None:
    manager, chunks = manager_with(tmp_path, 4, 4)
    manager.before_next_use(due_for(manager, chunks[:2]))
    manager.before_next_use(due_for(manager, chunks[2:]))
    with manager.use([Use(chunks[2].id, Access.READ), Use(chunks[0].id, Access.READ)]):
        assert [float(manager.tensor(chunks[i])[0]) for i in (0, 2)] == [1, 5]
    manager.close()


def test_an_interrupt_in_the_books_neither_loses_work_nor_does_it_twice(tmp_path: Path) -> None:
    for line in range(1000):
        manager, chunks = manager_with(tmp_path, 3, 3)
        due, done = due_for(manager, chunks, dead=1), []
        work = due.work

        def once(work: Callable[[], None] = work, done: list[bool] = done) -> None:
            if not done:
                done.append(True)
                work()

        due.work = once
        manager.before_next_use(due)
        with suppress(KeyboardInterrupt), interrupted_at(line, "memory/due") as lines:
            first(manager, chunks[0])
        assert [first(manager, chunk) for chunk in chunks[:2]] == [2, 1]
        with manager.use([Use(chunks[2].id, Access.OVERWRITE)]):
            manager.tensor(chunks[2]).fill_(7)
        assert [first(manager, chunk) for chunk in chunks] == [2, 1, 7]
        assert not manager.has_due()
        manager.close()
        if lines.where is None:
            return
    raise AssertionError("no end in sight")
