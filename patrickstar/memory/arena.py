"""CPU memory whose pages are recycled, under buffers whose addresses never change.

A chunk needs two things that ordinary allocation does not give together: its address must stay the
same while its contents come and go (parameters are permanent views into it, and autograd keeps more
views of them), and its pages must be recycled (asking the system for a fresh page costs many times
the copy into it: on the virtual machine where this was measured, 100 ms against 4 ms for 64 MiB).

So a buffer reserves address space once. *Committing* it gives it pages, *decommitting* parks its
pages where they are and makes the buffer inaccessible. When another buffer is committed, parked
pages are moved under it with `mremap(MREMAP_DONTUNMAP)`: no copy, no zeroing, about half a
millisecond for 64 MiB. Where the system has no such call, pages are given back and asked for anew,
which is slower and otherwise the same.

Buffers are page-aligned, so the disk tier reads into them and writes from them directly, and they
are left out of forked children (`MADV_DONTFORK`): a data-loader worker must neither double the
memory by copy-on-write nor move pages under an I/O in flight.

Contents after a commit are arbitrary unless `zero=True`.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field

import torch

PAGE = mmap.PAGESIZE
_HUGE = 2 << 20  # chunks of this size and more are aligned to, and advised for, huge pages

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_HUGEPAGE = 4, 10, 14
_MAP_FAILED = ctypes.c_void_p(-1).value


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        *[ctypes.c_int] * 3,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if sys.platform == "linux":
        libc.mremap.restype = ctypes.c_void_p
        libc.mremap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
    return libc


def _checked(status: int, call: str) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), f"{call} failed")


@dataclass(eq=False)
class Buffer:
    """Reserved address space of `nbytes` bytes (a whole number of pages) under one torch storage.

    `storage` is permanent: tensors made over it stay valid objects through every commit and
    decommit. Touching them while the buffer is decommitted is a segmentation fault, as with any
    freed storage; whoever owns the buffer commits it first.
    """

    address: int
    nbytes: int
    storage: torch.UntypedStorage = field(repr=False)
    committed: bool = False

    def tensor(self, dtype: torch.dtype, numel: int, offset: int = 0) -> torch.Tensor:
        """A flat view of `numel` elements of `dtype` that starts `offset` elements in."""
        view = torch.empty(0, dtype=dtype)
        return view.set_(self.storage, offset, (numel,), (1,))


def _unmap(libc: ctypes.CDLL, address: int, nbytes: int) -> None:
    libc.munmap(address, nbytes)


class PageArena:
    """Buffers over recycled CPU pages.

    `parked_bytes` counts pages that no committed buffer uses but the process still holds; they are
    part of the process's memory until `trim` gives them back.
    """

    def __init__(self) -> None:
        self._libc = _load_libc()
        self._moves_pages = sys.platform == "linux" and self._try_moving()
        # Parked pages by address: the buffer they lie under and how far they reach from its
        # start, oldest first. They are taken from the end, so they always start at the start.
        self._parked: OrderedDict[int, tuple[Buffer, int]] = OrderedDict()
        self.committed_bytes = 0
        self.parked_bytes = 0

    def reserve(self, nbytes: int) -> Buffer:
        """Reserve address space for at least `nbytes` bytes. No memory is used yet."""
        nbytes = -(-max(nbytes, 1) // PAGE) * PAGE
        align = _HUGE if nbytes >= _HUGE else PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        start = self._libc.mmap(None, nbytes + align, _PROT_NONE, flags, -1, 0)
        if start == _MAP_FAILED:
            raise MemoryError(f"no address space for a buffer of {nbytes} bytes")
        address = -(-start // align) * align
        if address > start:
            self._libc.munmap(start, address - start)
        if end := start + align - address:
            self._libc.munmap(address + nbytes, end)
        self._advise(address, nbytes)
        raw = (ctypes.c_char * nbytes).from_address(address)
        # The address space lives exactly as long as the last tensor over it.
        weakref.finalize(raw, _unmap, self._libc, address, nbytes).atexit = False
        storage = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
        return Buffer(address, nbytes, storage)

    def commit(self, buffer: Buffer, *, zero: bool = False) -> None:
        """Give `buffer` memory: parked pages first, fresh ones for the rest."""
        assert not buffer.committed, "a buffer is committed once"
        reached = self._take_back(buffer)
        _checked(self._libc.mprotect(buffer.address, buffer.nbytes, _PROT_READ_WRITE), "mprotect")
        while reached < buffer.nbytes and self._parked:
            reached += self._steal(buffer, reached)
        buffer.committed = True
        self.committed_bytes += buffer.nbytes
        if zero and reached:
            ctypes.memset(buffer.address, 0, reached)  # fresh pages are zero already

    def decommit(self, buffer: Buffer) -> None:
        """Take `buffer`'s memory away; its pages are parked for the next commit."""
        assert buffer.committed, "only a committed buffer can be decommitted"
        buffer.committed = False
        self.committed_bytes -= buffer.nbytes
        _checked(self._libc.mprotect(buffer.address, buffer.nbytes, _PROT_NONE), "mprotect")
        if self._moves_pages:
            self._parked[buffer.address] = (buffer, buffer.nbytes)
            self.parked_bytes += buffer.nbytes
        else:
            self._libc.madvise(buffer.address, buffer.nbytes, _MADV_DONTNEED)

    def discard(self, buffer: Buffer) -> None:
        """The buffer will not be committed again; its pages go back to the system.

        Its address space stays until the last tensor over it is gone.
        """
        if buffer.committed:
            self.decommit(buffer)
        reached = self._take_back(buffer)
        if reached:
            self._libc.madvise(buffer.address, reached, _MADV_DONTNEED)

    def trim(self, keep: int = 0) -> int:
        """Give parked pages back to the system until at most `keep` bytes are parked.

        Returns the number of bytes given back.
        """
        before = self.parked_bytes
        while self.parked_bytes > keep and self._parked:
            buffer, end = next(iter(self._parked.values()))
            size = min(end, -(-(self.parked_bytes - keep) // PAGE) * PAGE)
            self._libc.madvise(buffer.address + end - size, size, _MADV_DONTNEED)
            self._unpark(buffer, end, size)
        return before - self.parked_bytes

    def _take_back(self, buffer: Buffer) -> int:
        """Use the pages that still lie under `buffer`, if any; return how far they reach."""
        if buffer.address not in self._parked:
            return 0
        _, end = self._parked[buffer.address]
        self._unpark(buffer, end, end)
        return end

    def _steal(self, buffer: Buffer, reached: int) -> int:
        """Move pages of the oldest parked range under `buffer` from `reached` on."""
        donor, end = next(iter(self._parked.values()))
        size = min(end, buffer.nbytes - reached)
        source, target = donor.address + end - size, buffer.address + reached
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        moved = self._libc.mremap(source, size, size, flags, target)
        if moved == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mremap failed")
        # The pages came with the protection of where they were parked.
        _checked(self._libc.mprotect(target, size, _PROT_READ_WRITE), "mprotect")
        self._unpark(donor, end, size)
        return size

    def _unpark(self, buffer: Buffer, end: int, size: int) -> None:
        """Take the last `size` of the `end` bytes parked under `buffer` out of the books."""
        self.parked_bytes -= size
        if size == end:
            del self._parked[buffer.address]
        else:
            self._parked[buffer.address] = (buffer, end - size)

    def _advise(self, address: int, nbytes: int) -> None:
        if sys.platform == "linux":
            self._libc.madvise(address, nbytes, _MADV_DONTFORK)
            if nbytes >= _HUGE:
                self._libc.madvise(address, nbytes, _MADV_HUGEPAGE)

    def _try_moving(self) -> bool:
        """Whether this system moves pages between mappings (Linux 5.7 and later)."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        both = self._libc.mmap(None, 2 * PAGE, _PROT_READ_WRITE, flags, -1, 0)
        if both == _MAP_FAILED:
            return False
        ctypes.memset(both, 1, PAGE)
        move = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        moved = self._libc.mremap(both, PAGE, PAGE, move, both + PAGE)
        works = moved == both + PAGE and ctypes.string_at(both + PAGE, 1) == b"\x01"
        self._libc.munmap(both, 2 * PAGE)
        return bool(works)
