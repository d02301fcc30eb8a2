"""CPU memory that an accelerator copies from and to by itself.

Only page-locked memory is copied beside the computation. Locking costs a system call per block, so
blocks are kept when a chunk leaves and given to the next of the same size, as long as the budget
has room for them. PyTorch's own pinned allocator rounds up to powers of two, which would waste up
to half of a budget, so blocks are mapped and locked here.

Locked pages cannot be moved between addresses as those of `arena` are: a chunk may have another
address each time it comes.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Unlock = Callable[[], None]
Lock = Callable[[int, int], Unlock]
"""Locks the pages from an address on, so many bytes; returns what unlocks them."""


@dataclass(eq=False)
class _Block:
    memory: mmap.mmap
    flat: torch.Tensor = field(repr=False)
    unlock: Unlock = field(repr=False)


class PinnedTier:
    """CPU memory in page-locked blocks.

    Args:
        lock: locks pages for an accelerator; see `page_lock`.
    """

    fixed = False

    def __init__(self, name: str, capacity: int | None, lock: Lock) -> None:
        self.name, self.capacity, self._lock = name, capacity, lock
        self._used: dict[int, _Block] = {}
        self._free: dict[int, list[_Block]] = {}
        self._storages: set[int] = set()
        self.parked_bytes = 0

    def take(self, chunk: int, nbytes: int, *, zero: bool) -> None:
        free = self._free.get(nbytes)
        if free:
            block = self._used[chunk] = free[-1]
            free.pop()
            self.parked_bytes -= nbytes
            if zero:
                block.flat.zero_()
        else:
            self._used[chunk] = self._map(nbytes)  # zero already

    def give_back(self, chunk: int) -> None:
        block = self._used.pop(chunk)
        nbytes = len(block.memory)
        self._free.setdefault(nbytes, []).append(block)
        self.parked_bytes += nbytes

    def forget(self, chunk: int) -> None:
        assert chunk not in self._used, "a chunk is given back before it is forgotten"

    def settle(self, chunks: int, other: int) -> None:
        if self.capacity is not None:
            self._trim(max(self.capacity - chunks - other, 0))

    def mend(self, chunks: set[int]) -> None:
        used = {chunk: block for chunk, block in self._used.items() if chunk in chunks}
        blocks = {*self._used.values(), *(block for free in self._free.values() for block in free)}
        self._used, self._free, self.parked_bytes = used, {}, 0
        for block in blocks - set(used.values()):
            self._free.setdefault(len(block.memory), []).append(block)
            self.parked_bytes += len(block.memory)

    def close(self) -> None:
        self._trim(0)

    def tensor(self, chunk: int, nbytes: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return self._used[chunk].flat.view(dtype)[:numel]

    def owns(self, storage: int) -> bool:
        return storage in self._storages

    def view(self, chunk: int, nbytes: int) -> memoryview:
        return memoryview(self._used[chunk].memory)

    def _map(self, nbytes: int) -> _Block:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_DONTFORK"):
            memory.madvise(mmap.MADV_DONTFORK)  # a child must not copy what a device writes to
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        block = _Block(memory, flat, self._lock(flat.data_ptr(), nbytes))
        self._storages.add(flat.untyped_storage()._cdata)
        return block

    def _trim(self, keep: int) -> None:
        """Give free blocks back until at most `keep` bytes are left, the largest first."""
        for nbytes in sorted(self._free, reverse=True):
            free = self._free[nbytes]
            while free and self.parked_bytes > keep:
                block = free.pop()
                self.parked_bytes -= nbytes
                self._storages.discard(block.flat.untyped_storage()._cdata)
                block.unlock()  # its memory goes with the last tensor over it


def no_lock(address: int, nbytes: int) -> Unlock:
    """Leave pages as they are; copies then go through a buffer of the driver's."""
    return lambda: None


def page_lock(device: torch.device) -> Lock:
    """What locks pages for `device`; does nothing where no way is known."""
    if device.type != "cuda":
        return no_lock
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def lock(address: int, nbytes: int) -> Unlock:
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, nbytes, 0)))
        return lambda: torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))

    return lock
