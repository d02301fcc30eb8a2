"""Where chunks can be: memory and disk behind one small interface.

A tier gives a chunk a place (`take`), takes it back (`give_back`) and knows nothing of states or
budgets, which are the ledger's. Those of memory have tensors over their places. What is here serves
machines without an accelerator; `accelerator` and `pinned` are the tiers of those with one, and
`copying` has the ways between tiers.
"""

from __future__ import annotations

import ctypes
from typing import Protocol, runtime_checkable

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

    def mend(self, chunks: set[int]) -> None:
        """A change may have ended early: `chunks` have a place here, and nothing else has."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class MemoryTier(Tier, Protocol):
    """A tier whose chunks operators can work on.

    Attributes:
        fixed: whether a tensor over a chunk stays good when the chunk leaves and comes again.
    """

    fixed: bool

    def tensor(self, chunk: int, nbytes: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """A flat tensor over the place of `chunk`; a `fixed` tier may be asked at any time."""
        ...

    def owns(self, storage: int) -> bool:
        """Whether the storage with this C++ address is one of this tier's places."""
        ...


class CpuTier:
    """CPU memory over recycled pages, under addresses that never change."""

    fixed = True

    def __init__(self, name: str, capacity: int | None) -> None:
        self.name = name
        self.capacity = capacity
        self._arena = PageArena()
        self._buffers: dict[int, Buffer] = {}
        self._storages: set[int] = set()

    def buffer(self, chunk: int, nbytes: int) -> Buffer:
        """The permanent buffer of `chunk`, reserved at the first call."""
        found = self._buffers.get(chunk)
        if found is None:
            found = self._buffers[chunk] = self._arena.reserve(nbytes)
            # Known before a tensor is made over it: whoever watches operators must not count it.
            self._storages.add(found.storage._cdata)
        return found

    def tensor(self, chunk: int, nbytes: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return self.buffer(chunk, nbytes).tensor(dtype, numel)

    def owns(self, storage: int) -> bool:
        return storage in self._storages

    def take(self, chunk: int, nbytes: int, *, zero: bool) -> None:
        self._arena.commit(self.buffer(chunk, nbytes), zero=zero)

    def give_back(self, chunk: int) -> None:
        self._arena.decommit(self._buffers[chunk])

    def forget(self, chunk: int) -> None:
        buffer = self._buffers.pop(chunk, None)
        if buffer is not None:
            self._storages.discard(buffer.storage._cdata)
            self._arena.discard(buffer)

    def settle(self, chunks: int, other: int) -> None:
        if self.capacity is not None:
            room = self.capacity - chunks - other
            if self._arena.parked_bytes > room:
                self._arena.trim(max(room, 0))

    def mend(self, chunks: set[int]) -> None:
        self._arena.mend(
            [buffer for chunk, buffer in self._buffers.items() if chunk in chunks],
            [buffer for chunk, buffer in self._buffers.items() if chunk not in chunks],
        )

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

    def mend(self, chunks: set[int]) -> None:
        self.slots = {chunk: self.slots[chunk] for chunk in self.slots if chunk in chunks}
        self.spool.mend(list(self.slots.values()))

    def close(self) -> None:
        self.spool.close()
