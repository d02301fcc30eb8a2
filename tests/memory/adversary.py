"""Transfers at the worst of times, for tests of whoever relies on them.

An `Adversary` stands in for `TransferThreads`. Each copy happens either at once or at the last
possible moment, completions come in any order, and whoever changes the source of a copy, or takes
its place away, between its start and its end is found out. A real run has all of these timings; a
test has them on demand and can repeat them.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass

from patrickstar.errors import SpoolError
from patrickstar.memory.accelerator import AcceleratorTier
from patrickstar.memory.manager import ChunkManager
from patrickstar.memory.pinned import PinnedTier
from patrickstar.memory.tiers import CpuTier, DiskTier
from patrickstar.memory.transfer import Completion, Transfer


def contents(manager: ChunkManager, chunk: int, tier: int) -> bytes:
    """The bytes of a chunk's place on a tier, whatever the books say of them."""
    home, nbytes = manager.tiers[tier], manager.chunk(chunk).nbytes
    if isinstance(home, AcceleratorTier):
        return home._bytes[chunk].clone().numpy().tobytes()  # numpy locks a size
    if isinstance(home, CpuTier | PinnedTier):
        return bytes(home.view(chunk, nbytes))
    assert isinstance(home, DiskTier)
    arena = CpuTier("scratch", None)
    arena.take(0, nbytes, zero=False)
    view = arena.view(0, nbytes)
    home.spool.read(home.slots[chunk], view)
    return bytes(view)


@dataclass
class _Pending:
    transfer: Transfer
    copy: Callable[[], None]
    before: bytes
    copied: bool


class Adversary:
    """Runs copies when `late(n)` says so, and ends one of `n` in the order of `pick(n)`.

    Args:
        manager: whose transfers these are.
        late: whether the next copy happens at its end instead of its start.
        ready: whether a poll finds a completion.
        pick: which of `n` pending transfers ends next.
        fails: whether the next transfer ends with a `SpoolError`, its target full of rubbish.
    """

    def __init__(
        self,
        manager: ChunkManager,
        late: Callable[[], bool],
        ready: Callable[[], bool],
        pick: Callable[[int], int],
        fails: Callable[[], bool] = lambda: False,
    ) -> None:
        self.manager, self.late, self.ready, self.pick = manager, late, ready, pick
        self.fails = fails
        self.pending: list[_Pending] = []

    def start(self, transfer: Transfer, copy: Callable[[], None]) -> None:
        before = contents(self.manager, transfer.chunk, transfer.source)
        late = self.late()
        if not late:
            copy()
        self.pending.append(_Pending(transfer, copy, before, copied=not late))

    def poll(self) -> Completion | None:
        return self._end() if self.pending and self.ready() else None

    def wait(self) -> Completion:
        assert self.pending, "nothing was started that could be waited for: a real wait would hang"
        return self._end()

    def close(self) -> None:
        while self.pending:
            self._end()

    def _end(self) -> Completion:
        done = self.pending.pop(self.pick(len(self.pending)))
        transfer = done.transfer
        now = contents(self.manager, transfer.chunk, transfer.source)
        assert now == done.before, f"{transfer}: its source changed while it was copied"
        if self.fails():
            return Completion(transfer, SpoolError(errno.EIO, "the disk failed"))
        if not done.copied:
            done.copy()
        got = contents(self.manager, transfer.chunk, transfer.target)
        assert got == done.before, f"{transfer}: its target changed while it was copied"
        return Completion(transfer, None)
