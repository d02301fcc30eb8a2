"""An interrupt between any two lines of the manager loses nothing and leaks nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from patrickstar.memory import Access, Chunk, ChunkManager, CpuTier, DiskTier, Spool, Tier, Use
from patrickstar.memory.accelerator import AcceleratorTier
from patrickstar.memory.ledger import CopyState
from patrickstar.memory.pinned import PinnedTier, page_lock
from tests.interrupts import interrupted_at

KIB = 1024
CHUNKS = 5


class Work:
    """Chunks that are counted up, dropped and made anew, in rounds that are planned."""

    def __init__(self, folder: Path, kind: str) -> None:
        disk = DiskTier("disk", Spool(folder))
        if kind == "host":
            tiers: list[Tier] = [CpuTier("host", 48 * KIB), disk]
        elif kind == "device and host":
            tiers = [CpuTier("device", 48 * KIB), CpuTier("host", 80 * KIB), disk]
        else:
            device = AcceleratorTier("device", 48 * KIB, torch.device("cpu"))
            host = PinnedTier("host", 80 * KIB, page_lock(torch.device("cpu")))
            tiers = [device, host, disk]
        self.manager = ChunkManager(tiers)
        self.chunks = [self.manager.create(4 * KIB, torch.float32) for _ in range(CHUNKS)]
        self.values = [0.0] * CHUNKS
        # What an operation that was interrupted may have left instead.
        self.maybe: list[float | None] = [None] * CHUNKS

    def round(self) -> None:
        manager = self.manager
        manager.begin_iteration("round")
        manager.segment("all")
        for number, chunk in enumerate(self.chunks):
            manager.set_other(0, (number % 2) * 8 * KIB)
            if number == 1:
                self.maybe[number] = 0.0
                manager.release(chunk)
                self._settled(number, 0.0)
            if number == 2:
                self.maybe[number] = -1.0
                with manager.use([Use(chunk.id, Access.OVERWRITE)]):
                    manager.tensor(chunk).fill_(-1)
                self._settled(number, -1.0)
            self.maybe[number] = self.values[number] + 1
            with manager.use([Use(chunk.id, Access.UPDATE)]):
                manager.tensor(chunk).add_(1)
            self._settled(number, self.values[number] + 1)
            manager.access([Use(self.chunks[number - 1].id, Access.READ)])
        self._replace(CHUNKS - 1)
        manager.end_iteration()

    def _replace(self, number: int) -> None:
        """A chunk that lives for one round beside the others, and one that goes away."""
        short = self.manager.create(2 * KIB, torch.float32)
        with self.manager.use([Use(short.id, Access.OVERWRITE)]):
            self.manager.tensor(short).fill_(7)
        self.manager.evict(short)
        self.manager.delete(short)

    def _settled(self, number: int, value: float) -> None:
        self.values[number], self.maybe[number] = value, None

    def take_over(self) -> None:
        """Contents are as before or after the operation that was interrupted, never in between."""
        for number, chunk in enumerate(self.chunks):
            found = self.value_of(chunk)
            allowed = {self.values[number], self.maybe[number]}
            if self.maybe[number] == -1.0 and found - allowed:
                # Old contents were to be replaced, and new ones have not been written.
                found = {0.0}
                with self.manager.use([Use(chunk.id, Access.OVERWRITE)]):
                    self.manager.tensor(chunk).zero_()
            assert len(found) == 1, (number, found)
            assert self.maybe[number] == -1.0 or found <= allowed, (number, found, allowed)
            self._settled(number, found.pop())

    def value_of(self, chunk: Chunk) -> set[float]:
        with self.manager.use([Use(chunk.id, Access.READ)]):
            return set(self.manager.tensor(chunk).tolist())

    def check(self) -> None:
        ledger = self.manager.ledger
        self.manager.set_other(0, 0)
        self.manager.settle()
        for number, chunk in enumerate(self.chunks):
            assert self.value_of(chunk) == {self.values[number]}
        self.manager.settle()
        for number, account in enumerate(ledger.tiers):
            valid = [c for c in ledger.chunks() if ledger.is_valid(c, number)]
            assert account.chunks == sum(ledger.entry(c).nbytes for c in valid)
            tier = self.manager.tiers[number]
            if isinstance(tier, CpuTier):
                assert tier._arena.committed_bytes == account.chunks
                assert account.chunks <= (account.capacity or 0)
            elif isinstance(tier, DiskTier):
                assert set(tier.slots) == set(valid)
            elif isinstance(tier, PinnedTier):
                assert set(tier._used) == set(valid)
            elif isinstance(tier, AcceleratorTier):
                here = {c for c, flat in tier._bytes.items() if flat.untyped_storage().nbytes()}
                assert here == set(valid)
        for chunk_id in ledger.chunks():
            entry = ledger.entry(chunk_id)
            assert not any(entry.pins) and not any(entry.locks) and not any(entry.writers)
            assert CopyState.LOADING not in entry.copies


def lines_of_a_round(folder: Path, kind: str) -> int:
    work = Work(folder, kind)
    work.round()
    with interrupted_at(None, "memory") as lines:
        work.round()
    work.manager.close()
    return lines.seen


def interrupt(folder: Path, kind: str, line: int, warm: int) -> None:
    work = Work(folder, kind)
    for _ in range(warm):
        work.round()
    with interrupted_at(line, "memory") as lines:
        with suppress(KeyboardInterrupt):
            work.round()
    work.manager.abandon_iteration()
    try:
        work.take_over()
        for _ in range(2):
            work.round()
        work.check()
    except BaseException as error:
        raise AssertionError(f"after an interrupt at {lines.where} (line {line})") from error
    finally:
        work.manager.close()


def places(total: int, count: int) -> Iterator[int]:
    """`count` lines spread over `total`, with the same steps in between every time."""
    return iter(range(0, total, max(1, total // count)))


@pytest.mark.parametrize("kind", ["host", "device and host", "accelerator"])
@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_loses_nothing(tmp_path: Path, kind: str, warm: int) -> None:
    for line in places(lines_of_a_round(tmp_path, kind), 50):
        interrupt(tmp_path, kind, line, warm)
