"""CPU memory whose pages are recycled, under buffers whose addresses never change.

A chunk needs two things that ordinary allocation does not give together: its address must stay the
same while its contents come and go (parameters are permanent views into it, and autograd keeps more
views of them), and its pages must be recycled (asking the system for a fresh page costs many times
the copy into it: on the virtual machine where this was measured, 100 ms against 4 ms for 64 MiB).

So a buffer reserves address space once. *Committing* it gives it pages, *decommitting* parks its
pages where they are and makes the buffer inaccessible. When another buffer is committed, parked
pages are moved under it with `mremap(MREMAP_DONTUNMAP)`: no copy, no zeroing, about half a
millisecond for 64 MiB. Where the system has no such call, or refuses it, pages are given back and
asked for anew, which is slower and otherwise the same.

Huge pages stay whole. Direct I/O into huge pages was measured at 1.7 to 2 times the rate of I/O
into ordinary ones (a request of the disk has room for so many pieces of memory and no more), so a
buffer exchanges its huge pages only for others, and the ordinary pages behind the last one only for
ordinary ones. What one kind lacks is asked for anew, and whoever owns the arena trims the other.

Pages that were moved stay mappings of their own, and most kernels move only inside one mapping: a
buffer knows where it is cut, and moves go piece by piece. Buffers of one size exchange their pages
without a cut. A buffer whose pages are all gone gets a fresh mapping, so cuts do not pile up.

Buffers are page-aligned, so the disk tier reads into them and writes from them directly. A forked
child finds them empty (`MADV_WIPEONFORK`): a data-loader worker must neither double the memory by
copy-on-write nor move pages under an I/O in flight. They are not left out of the child, as the
older `MADV_DONTFORK` does, since the hole would soon hold something else.

Contents after a commit are arbitrary unless `zero=True`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from patrickstar.memory.libc import load_libc
from patrickstar.memory.parked import ParkedPages, Region

PAGE = mmap.PAGESIZE
_HUGE = 2 << 20  # chunks of this size and more are aligned to, and advised for, huge pages
_MOST_CUTS = 32  # each costs a system call and a mapping, of which a process may have 65,530

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FIXED, _NORESERVE = 0x10, getattr(mmap, "MAP_NORESERVE", 0x4000)
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_WIPEONFORK = 4, 10, 14, 18
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(eq=False)
class Buffer:
    """Reserved address space of `nbytes` bytes (a whole number of pages) under one torch storage.

    `storage` is permanent: tensors made over it stay valid objects through every commit and
    decommit. Touching them while the buffer is decommitted is a segmentation fault, as with any
    freed storage; whoever owns the buffer commits it first.

    `cuts` are the offsets at which one mapping of the system may end and another begin, in order.
    """

    address: int
    nbytes: int
    storage: torch.UntypedStorage = field(repr=False)
    committed: bool = False
    cuts: list[int] = field(default_factory=list, repr=False)

    @property
    def whole(self) -> int:
        """Bytes of its huge pages, from its start on; what follows are ordinary pages."""
        return self.nbytes // _HUGE * _HUGE

    def tensor(self, dtype: torch.dtype, numel: int, offset: int = 0) -> torch.Tensor:
        """A flat view of `numel` elements of `dtype` that starts `offset` elements in."""
        view = torch.empty(0, dtype=dtype)
        return view.set_(self.storage, offset, (numel,), (1,))

    def piece_before(self, end: int) -> int:
        """Where the piece begins that ends at, or reaches beyond, `end`."""
        place = bisect_left(self.cuts, end)
        return self.cuts[place - 1] if place else 0

    def replaced(self, start: int, end: int) -> None:
        """A mapping of its own lies from `start` to `end` now."""
        del self.cuts[bisect_right(self.cuts, start) : bisect_left(self.cuts, end)]
        self.cut(start)
        self.cut(end)

    def cut(self, offset: int) -> None:
        if 0 < offset < self.nbytes and offset not in self.cuts:
            insort(self.cuts, offset)


def _unmap(libc: ctypes.CDLL, process: int, address: int, nbytes: int) -> None:
    # A forked child may never have had this mapping, but something of its own there.
    if os.getpid() == process:
        libc.munmap(address, nbytes)


class PageArena:
    """Buffers over recycled CPU pages.

    `parked_bytes` counts pages that no committed buffer uses but the process still holds; they are
    part of the process's memory until `trim` gives them back.
    """

    def __init__(self) -> None:
        self._libc = load_libc()
        self._moves_pages = sys.platform == "linux" and self._try_moving()
        self._blocks: ParkedPages[Buffer] = ParkedPages(_HUGE)
        self._pages: ParkedPages[Buffer] = ParkedPages(PAGE)
        self.committed_bytes = 0

    @property
    def parked_bytes(self) -> int:
        return self._blocks.nbytes + self._pages.nbytes

    def reserve(self, nbytes: int) -> Buffer:
        """Reserve address space for at least `nbytes` bytes. No memory is used yet."""
        nbytes = -(-max(nbytes, 1) // PAGE) * PAGE
        align = _HUGE if nbytes >= _HUGE else PAGE
        flags = _PRIVATE | _NORESERVE
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
        end_of_life = weakref.finalize(raw, _unmap, self._libc, os.getpid(), address, nbytes)
        end_of_life.atexit = False
        storage = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
        return Buffer(address, nbytes, storage)

    def commit(self, buffer: Buffer, *, zero: bool = False) -> None:
        """Give `buffer` memory: parked pages first, fresh ones for the rest.

        Raises:
            MemoryError: the system refuses to; the buffer has no memory then.
        """
        assert not buffer.committed, "a buffer is committed once"
        recycled: list[tuple[int, int]] = []
        for pool, start, end in self._regions(buffer):
            reached = self._fill(buffer, pool, start, end)
            if reached is None:
                recycled.clear()
                break
            recycled.append((start, reached))
        if self._libc.mprotect(buffer.address, buffer.nbytes, _PROT_READ_WRITE) != 0:
            code = ctypes.get_errno()
            self._renew(buffer)
            raise MemoryError(f"no memory for a buffer of {buffer.nbytes}: {os.strerror(code)}")
        buffer.committed = True
        self.committed_bytes += buffer.nbytes
        if zero:  # fresh pages are zero already
            for start, reached in recycled:
                ctypes.memset(buffer.address + start, 0, reached - start)

    def decommit(self, buffer: Buffer) -> None:
        """Take `buffer`'s memory away; its pages are parked for the next commit."""
        assert buffer.committed, "only a committed buffer can be decommitted"
        buffer.committed = False
        self.committed_bytes -= buffer.nbytes
        protected = self._libc.mprotect(buffer.address, buffer.nbytes, _PROT_NONE) == 0
        if protected and self._moves_pages and len(buffer.cuts) <= _MOST_CUTS:
            for pool, start, end in self._regions(buffer):
                pool.park(buffer, start, end)
        else:
            self._renew(buffer)

    def discard(self, buffer: Buffer) -> None:
        """The buffer will not be committed again; its pages go back to the system.

        Its address space stays until the last tensor over it is gone.
        """
        if buffer.committed:
            self.decommit(buffer)
        for pool in (self._pages, self._blocks):
            if (own := pool.of(buffer)) is not None:
                pool.take(own, own.end - own.start)
        self._renew(buffer)

    def trim(self, keep: int = 0) -> int:
        """Give parked pages back to the system until at most `keep` bytes are parked.

        Returns the number of bytes given back.
        """
        before = self.parked_bytes
        for pool in (self._pages, self._blocks):
            while pool and (excess := self.parked_bytes - keep) > 0:
                region = pool.oldest()
                size = min(region.end - region.start, -(-excess // pool.unit) * pool.unit)
                start = region.buffer.address + region.end - size
                self._libc.madvise(start, size, _MADV_DONTNEED)
                pool.take(region, size)
        return before - self.parked_bytes

    def mend(self, committed: Sequence[Buffer], others: Sequence[Buffer]) -> None:
        """A change may have ended early: only `committed` have memory, and nothing is parked."""
        self._blocks.clear()
        self._pages.clear()
        for buffer in others:
            self._renew(buffer)
            buffer.committed = False
        for buffer in committed:
            buffer.committed = True
        self.committed_bytes = sum(buffer.nbytes for buffer in committed)

    def _regions(self, buffer: Buffer) -> Iterator[tuple[ParkedPages[Buffer], int, int]]:
        """The parts of `buffer` that are recycled apart, with where they begin and end."""
        if buffer.whole:
            yield self._blocks, 0, buffer.whole
        if buffer.whole < buffer.nbytes:
            yield self._pages, buffer.whole, buffer.nbytes

    def _fill(self, buffer: Buffer, pool: ParkedPages[Buffer], start: int, end: int) -> int | None:
        """Bring parked pages under a region; where they end, or None if the system refused.

        Pages that still lie there are used first, then those of a region of the same size, which
        fit without a cut, then the oldest.
        """
        own = pool.of(buffer)
        reached = start
        if own is not None:
            reached = own.end
            pool.take(own, own.end - own.start)
        while reached < end and pool:
            same = pool.full(end - start) if reached == start else None
            moved = self._steal(buffer, reached, end, pool, same or pool.oldest())
            if not moved:
                return None
            reached += moved
        return reached

    def _steal(
        self,
        buffer: Buffer,
        reached: int,
        end: int,
        pool: ParkedPages[Buffer],
        region: Region[Buffer],
    ) -> int:
        """Move the end of a parked region under `buffer` at `reached`; return how many bytes.

        0 means that the system refused, and that `buffer` has no pages and nothing is parked now.
        """
        donor = region.buffer
        first = max(region.start, donor.piece_before(region.end))
        size = min(region.end - first, end - reached)
        source, target = donor.address + region.end - size, buffer.address + reached
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        if self._libc.mremap(source, size, size, flags, target) != target:
            self._stop_moving(buffer)
            return 0
        buffer.replaced(reached, reached + size)
        donor.cut(region.end - size)
        donor.cut(region.end)
        pool.take(region, size)
        if donor not in self._blocks and donor not in self._pages:
            self._renew(donor)
        return size

    def _stop_moving(self, buffer: Buffer) -> None:
        """The system refused a move: go on with fresh pages, for `buffer` and from now on.

        A refused move may have unmapped its target already, so the whole buffer is mapped anew.
        """
        self._moves_pages = False
        self.trim()
        self._renew(buffer)

    def _renew(self, buffer: Buffer) -> None:
        """Put one fresh mapping without pages or page tables under `buffer`."""
        flags = _PRIVATE | _NORESERVE | _FIXED
        made = self._libc.mmap(buffer.address, buffer.nbytes, _PROT_NONE, flags, -1, 0)
        if made == buffer.address:
            buffer.cuts.clear()
            self._advise(buffer.address, buffer.nbytes)
        else:  # too many mappings; the old ones do without their pages
            self._libc.madvise(buffer.address, buffer.nbytes, _MADV_DONTNEED)

    def _advise(self, address: int, nbytes: int) -> None:
        if sys.platform == "linux":
            if self._libc.madvise(address, nbytes, _MADV_WIPEONFORK) != 0:  # before Linux 4.14
                self._libc.madvise(address, nbytes, _MADV_DONTFORK)
            if nbytes >= _HUGE:
                self._libc.madvise(address, nbytes, _MADV_HUGEPAGE)

    def _try_moving(self) -> bool:
        """Whether this system moves pages between mappings (Linux 5.7 and later)."""
        both = self._libc.mmap(None, 2 * PAGE, _PROT_READ_WRITE, _PRIVATE, -1, 0)
        if both == _MAP_FAILED:
            return False
        ctypes.memset(both, 1, PAGE)
        move = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        moved = self._libc.mremap(both, PAGE, PAGE, move, both + PAGE)
        works = moved == both + PAGE and ctypes.string_at(both + PAGE, 1) == b"\x01"
        self._libc.munmap(both, 2 * PAGE)
        return bool(works)
