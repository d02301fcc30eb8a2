"""Where chunks can be: memory and disk behind one small interface.

A tier gives a chunk a place (`take`), takes it back (`give_back`) and knows nothing of states or
budgets, which are the ledger's. `copy` moves one chunk's bytes between two tiers and is called on a
transfer thread.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from patrickstar.memory.arena import Buffer, PageArena
from patrickstar.memory.spool import Slot, Spool


class Tier(Protocol):
    """A kind of memory that can hold chunks.

    Attributes:
        name: "device", "host" or "disk".
        capacity: its budget in bytes, None for unlimited.
    """

    name: str
    capacity: int | None

    def take(self, chunk: int, nbytes: int, *, zero: bool) -> None:
        """Give `chunk` a place of `nbytes` bytes, filled with zeros if asked."""
        ...

    def give_back(self, chunk: int) -> None:
        """Take the place away; what was there is lost."""
        ...

    def forget(self, chunk: int) -> None:
        """The chunk will never come again."""
        ...

    def settle(self, chunks: int, other: int) -> None:
        """Chunks take `chunks` bytes now and others `other`: keep the rest inside the budget."""
        ...

    def close(self) -> None: ...


class CpuTier:
    """CPU memory over recycled pages."""

    def __init__(self, name: str, capacity: int | None) -> None:
        self.name = name
        self.capacity = capacity
        self._arena = PageArena()
        self._buffers: dict[int, Buffer] = {}

    def buffer(self, chunk: int, nbytes: int) -> Buffer:
        """The permanent buffer of `chunk`, reserved at the first call."""
        found = self._buffers.get(chunk)
        if found is None:
            found = self._buffers[chunk] = self._arena.reserve(nbytes)
        return found

    def take(self, chunk: int, nbytes: int, *, zero: bool) -> None:
        self._arena.commit(self.buffer(chunk, nbytes), zero=zero)

    def give_back(self, chunk: int) -> None:
        self._arena.decommit(self._buffers[chunk])

    def forget(self, chunk: int) -> None:
        buffer = self._buffers.pop(chunk, None)
        if buffer is not None:
            self._arena.discard(buffer)

    def settle(self, chunks: int, other: int) -> None:
        if self.capacity is not None:
            room = self.capacity - chunks - other
            if self._arena.parked_bytes > room:
                self._arena.trim(max(room, 0))

    def view(self, chunk: int, nbytes: int) -> memoryview:
        buffer = self._buffers[chunk]
        return memoryview((ctypes.c_char * nbytes).from_address(buffer.address)).cast("B")

    def close(self) -> None:
        self._arena.trim()


class DiskTier:
    """Slots of a spool file."""

    def __init__(self, name: str, spool: Spool) -> None:
        self.name = name
        self.capacity = spool.capacity
        self.spool = spool
        self.slots: dict[int, Slot] = {}

    def take(self, chunk: int, nbytes: int, *, zero: bool) -> None:
        assert not zero, "a chunk is never created on disk"
        self.slots[chunk] = self.spool.allocate(nbytes)

    def give_back(self, chunk: int) -> None:
        self.spool.free(self.slots.pop(chunk))

    def forget(self, chunk: int) -> None:
        assert chunk not in self.slots, "a chunk is given back before it is forgotten"

    def settle(self, chunks: int, other: int) -> None:
        """The file keeps its space, which is what preallocating it is for."""

    def close(self) -> None:
        self.spool.close()


def copy(chunk: int, nbytes: int, source: Tier, target: Tier) -> None:
    """Copy the `nbytes` bytes of `chunk` from one tier to another; both have a place for it."""
    if isinstance(source, CpuTier) and isinstance(target, DiskTier):
        target.spool.write(target.slots[chunk], source.view(chunk, nbytes))
    elif isinstance(source, DiskTier) and isinstance(target, CpuTier):
        source.spool.read(source.slots[chunk], target.view(chunk, nbytes))
    elif isinstance(source, CpuTier) and isinstance(target, CpuTier):
        from_, to = source.buffer(chunk, nbytes), target.buffer(chunk, nbytes)
        ctypes.memmove(to.address, from_.address, nbytes)
    else:
        raise AssertionError(f"no way from {source.name} to {target.name}")


def flat_tensor(
    tier: CpuTier, chunk: int, nbytes: int, dtype: torch.dtype, numel: int
) -> torch.Tensor:
    """The flat tensor over a chunk's permanent buffer on a memory tier."""
    return tier.buffer(chunk, nbytes).tensor(dtype, numel)
