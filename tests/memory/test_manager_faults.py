"""What fails in a tier reaches the user as an error, and loses nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from patrickstar.errors import ChunkStateError, SpoolError
from patrickstar.memory import Access, Chunk, ChunkManager, CpuTier, DiskTier, Lru, Spool, Use
from patrickstar.memory.observer import Why
from patrickstar.memory.planner import Action

KIB = 1024


class SickDisk:
    """`os.preadv` and `os.pwritev` that fail while `sick`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sick: Callable[[], int] | None = None
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))

    def wrap(self, call: Any) -> Any:
        def transfer(file: int, buffers: Any, offset: int) -> int:
            return self.sick() if self.sick is not None else int(call(file, buffers, offset))

        return transfer


def fails(code: int) -> Callable[[], int]:
    def fail() -> int:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SickDisk:
    return SickDisk(monkeypatch)


@pytest.fixture
def manager(tmp_path: Path, disk: SickDisk) -> Iterator[ChunkManager]:
    tiers = [CpuTier("host", 64 * KIB), DiskTier("disk", Spool(tmp_path))]
    manager = ChunkManager(tiers, policy=Lru())
    yield manager
    manager.close()


def make(manager: ChunkManager, value: float) -> Chunk:
    chunk = manager.create(16 * KIB // 4, torch.float32)
    with manager.use([Use(chunk.id, Access.OVERWRITE)]):
        manager.tensor(chunk).fill_(value)
    return chunk


def value_of(manager: ChunkManager, chunk: Chunk) -> float:
    with manager.use([Use(chunk.id, Access.READ)]):
        return float(manager.tensor(chunk).unique())


@pytest.mark.parametrize("sick", [fails(errno.EIO), fails(errno.ENOSPC), lambda: 0, lambda: 100])
def test_a_write_that_fails_is_an_error_and_the_chunk_stays_where_it_is(
    manager: ChunkManager, disk: SickDisk, sick: Callable[[], int]
) -> None:
    chunks = [make(manager, value) for value in range(4)]
    disk.sick = sick
    with pytest.raises(SpoolError, match="could not write to the spool file"):
        make(manager, 4)
    assert manager.report().tiers["host"].in_use == 64 * KIB
    assert manager.report().tiers["disk"].in_use == 0
    assert [value_of(manager, chunk) for chunk in chunks] == [0, 1, 2, 3]
    disk.sick = None
    chunks.append(make(manager, 4))
    assert [value_of(manager, chunk) for chunk in chunks] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("sick", [fails(errno.EIO), lambda: 0, lambda: 100])
def test_a_read_that_fails_is_an_error_and_can_be_tried_again(
    manager: ChunkManager, disk: SickDisk, sick: Callable[[], int]
) -> None:
    chunk = make(manager, 7)
    manager.evict(chunk)
    disk.sick = sick
    for _ in range(3):
        with pytest.raises(SpoolError, match="could not read from the spool file"):
            value_of(manager, chunk)
    assert manager.report().tiers["host"].in_use == 0
    disk.sick = None
    assert value_of(manager, chunk) == 7


def test_a_prefetch_that_fails_is_reported_at_the_next_access_and_loses_nothing(
    manager: ChunkManager, disk: SickDisk
) -> None:
    chunk, other = make(manager, 7), make(manager, 8)
    manager.evict(chunk)
    disk.sick = fails(errno.EIO)
    manager.prefetch(chunk)
    while not manager._residency._threads._done.qsize():
        pass
    with pytest.raises(SpoolError):
        value_of(manager, other)
    disk.sick = None
    assert [value_of(manager, chunk), value_of(manager, other)] == [7, 8]


def test_a_full_disk_is_an_error_that_names_the_need_and_loses_nothing(tmp_path: Path) -> None:
    tiers = [CpuTier("host", 64 * KIB), DiskTier("disk", Spool(tmp_path))]
    manager = ChunkManager(tiers)
    chunks = [make(manager, value) for value in range(4)]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(SpoolError, match="is too small: the spool file needs"):
            make(manager, 4)
        assert [value_of(manager, chunk) for chunk in chunks] == [0, 1, 2, 3]
    chunks.append(make(manager, 4))
    assert [value_of(manager, chunk) for chunk in chunks] == [0, 1, 2, 3, 4]
    manager.close()


def test_a_verified_disk_that_returns_other_bytes_is_found_out(tmp_path: Path) -> None:
    spool = Spool(tmp_path, verify=True)
    manager = ChunkManager([CpuTier("host", 64 * KIB), DiskTier("disk", spool)])
    chunk = make(manager, 7)
    manager.evict(chunk)
    os.pwrite(os.open(f"/proc/self/fd/{spool._file}", os.O_WRONLY), b"x", 5000)
    with pytest.raises(SpoolError, match="not the bytes that were written there"):
        value_of(manager, chunk)
    assert not manager.ledger.is_valid(chunk.id, 0)
    manager.close()


def test_memory_that_cannot_be_had_leaves_the_books_right(
    manager: ChunkManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [make(manager, value) for value in range(2)]

    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory")

    manager.evict(chunks[1])
    with monkeypatch.context() as patch:
        patch.setattr(manager.tiers[0]._arena, "commit", refuse)  # type: ignore[attr-defined]
        with pytest.raises(MemoryError, match="no memory"):
            value_of(manager, chunks[1])
        with pytest.raises(MemoryError, match="no memory"):
            make(manager, 5)
    assert manager.report().tiers["host"].in_use == 16 * KIB
    assert [value_of(manager, chunk) for chunk in chunks] == [0, 1]


def test_a_forked_child_is_told_that_chunks_are_not_its_own(manager: ChunkManager) -> None:
    resident, evicted = make(manager, 1), make(manager, 2)
    manager.evict(evicted)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            refused = 0
            for chunk in (resident, evicted):
                try:
                    value_of(manager, chunk)
                except ChunkStateError as error:
                    refused += "forked" in str(error)
            code = 0 if refused == 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [value_of(manager, resident), value_of(manager, evicted)] == [1, 2]


def test_workers_forked_during_transfers_neither_harm_nor_are_harmed(tmp_path: Path) -> None:
    class Squares(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> int:
            return index * index

    tiers = [CpuTier("host", 8 << 20), DiskTier("disk", Spool(tmp_path))]
    manager = ChunkManager(tiers)
    chunks = [manager.create(1 << 18, torch.float32) for _ in range(20)]  # 1 MiB each
    expected = torch.zeros(len(chunks))
    for epoch in range(2):
        loader = torch.utils.data.DataLoader(Squares(), batch_size=8, num_workers=2)
        seen = []
        for step, batch in enumerate(loader):
            seen += batch.tolist()
            for index in range(step, len(chunks), 4):
                manager.prefetch(chunks[(index + 4) % len(chunks)])
                with manager.use([Use(chunks[index].id, Access.UPDATE)]):
                    manager.tensor(chunks[index]).add_(epoch + step)
                expected[index] += epoch + step
        assert seen == [n * n for n in range(64)]
    for chunk, value in zip(chunks, expected.tolist(), strict=True):
        assert value_of(manager, chunk) == value
    manager.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_on_disk_when_a_run_is_ended_by_a_signal(
    tmp_path: Path, number: signal.Signals
) -> None:
    program = f"""
        import torch
        from patrickstar.memory import *
        disk = DiskTier("disk", Spool({str(tmp_path)!r}))
        manager = ChunkManager([CpuTier("host", 4 << 20), disk])
        chunks = [manager.create(1 << 18, torch.float32) for _ in range(16)]
        print("running", flush=True)
        while True:
            for chunk in chunks:
                with manager.use([Use(chunk.id, Access.UPDATE)]):
                    manager.tensor(chunk).add_(1)
    """
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # Whoever runs the tests in the background has interrupts ignored, also by the children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert run.stdout is not None
    try:
        with run.stdout:
            assert run.stdout.readline() == "running\n"
            run.send_signal(number)
            run.wait(timeout=30)
    finally:
        run.kill()
    assert run.returncode != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arrived", [False, True], ids=["on its way", "arrived"])
def test_a_planned_load_of_what_is_replaced_begins_while_another_chunk_is_waited_for(
    manager: ChunkManager, monkeypatch: pytest.MonkeyPatch, arrived: bool
) -> None:
    replaced, read, *others = [make(manager, value) for value in range(6)]
    manager.evict(replaced)
    manager.evict(read)
    with manager.use([Use(chunk.id, Access.UPDATE) for chunk in others[:3]]):
        pass  # dirty: room has to be waited for
    bring, begun = manager._mover.bring, []

    def plan(_: Any) -> None:
        manager._mover.schedule(Action("load", replaced.id, 0))

    def wait_for_read(chunk: int, tier: int) -> None:
        bring(chunk, tier)
        if chunk == read.id:
            for other in others:  # somebody makes room, as a plan does
                if manager.ledger.is_valid(other.id, 0) and not manager._residency.is_moving(
                    other.id
                ):
                    manager._mover.evict(other.id, 0, Why.ROOM)
            manager._mover.pump()
            begun.append(manager._residency.is_moving(replaced.id))
            if arrived:
                manager._mover.settle(replaced.id)

    monkeypatch.setattr(manager, "_begin_moment", plan)
    monkeypatch.setattr(manager._mover, "bring", wait_for_read)
    with manager.use([Use(replaced.id, Access.OVERWRITE), Use(read.id, Access.READ)]):
        monkeypatch.undo()
        assert begun == [True] or manager.ledger.is_valid(replaced.id, 0)
        manager.tensor(replaced).fill_(9)
        assert manager.tensor(read).eq(1).all()
    manager.settle()
    assert not manager.ledger.is_valid(replaced.id, 1), "the disk has the old contents"
    assert [value_of(manager, c) for c in (replaced, read, *others)] == [9, 1, 2, 3, 4, 5]
