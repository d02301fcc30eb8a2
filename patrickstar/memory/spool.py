"""The disk tier: one spool file of chunk slots.

The file is private (0600) and has no name: it is unlinked as soon as it is open, so it is gone
after the run even when the run is killed. Space is preallocated, so a disk that is too small is
found before the run and not in the middle of it. I/O is direct where the file system allows it
(the data is ours alone, read once and soon overwritten: a page cache would only double it), in
blocks, and every short read or write is either continued or reported.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from patrickstar.errors import SpoolError
from patrickstar.memory.sizes import format_bytes

_ALIGN = 4096  # what direct I/O asks of offsets, lengths and addresses on today's disks
_BLOCK = 16 << 20  # one request: long enough for full bandwidth, short enough to interleave


@dataclass(frozen=True)
class Slot:
    """A place in the spool file: `nbytes` bytes from byte `offset` on."""

    offset: int
    nbytes: int


class Spool:
    """A file of slots in the folder `path`, at most `capacity` bytes large (None: the disk's size).

    `read` and `write` may be called from several threads at once, for different slots;
    `allocate`, `free` and `close` belong to one thread.
    """

    def __init__(self, path: str | os.PathLike[str], capacity: int | None = None) -> None:
        self.path = Path(path)
        self.capacity = capacity
        self.direct = False
        self._free: dict[int, list[Slot]] = {}
        self._end = 0
        self._allocated = 0
        self._file = self._open()

    def _open(self) -> int:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file, name = tempfile.mkstemp(prefix="patrickstar-", suffix=".spool", dir=self.path)
        except OSError as error:
            raise SpoolError(
                error.errno or errno.EIO,
                f"cannot make a spool file in {str(self.path)!r}: {error.strerror or error}. "
                "Give patrickstar.memory.disk.path a folder that this user can write to",
            ) from error
        try:
            direct = os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC)
        except OSError:  # a file system without direct I/O; the buffered file does as well
            direct = -1
        os.unlink(name)
        if direct < 0:
            return file
        os.close(file)
        self.direct = hasattr(os, "O_DIRECT")
        return direct

    def preallocate(self, nbytes: int) -> None:
        """Make sure that slots of `nbytes` bytes in total will fit.

        Raises:
            SpoolError: the capacity or the disk is too small; the message says by how much.
        """
        self._grow(self._allocated + nbytes)

    def allocate(self, nbytes: int) -> Slot:
        """A slot of at least `nbytes` bytes."""
        nbytes = -(-nbytes // _ALIGN) * _ALIGN
        slots = self._free.get(nbytes)
        if slots:
            return slots.pop()
        slot = Slot(self._allocated, nbytes)
        self._grow(self._allocated + nbytes)
        self._allocated += nbytes
        return slot

    def free(self, slot: Slot) -> None:
        """Give a slot back for reuse by slots of the same size."""
        self._free.setdefault(slot.nbytes, []).append(slot)

    def write(self, slot: Slot, data: memoryview) -> None:
        """Write `data` (page-aligned, no longer than the slot) into `slot`."""
        self._transfer(slot, data, os.pwritev, "write to")

    def read(self, slot: Slot, data: memoryview) -> None:
        """Fill `data` (page-aligned, no longer than the slot) from `slot`."""
        self._transfer(slot, data, os.preadv, "read from")

    def close(self) -> None:
        """Close the file; its space is free from then on. Closing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _transfer(self, slot: Slot, data: memoryview, call: object, what: str) -> None:
        assert data.nbytes <= slot.nbytes, "data is longer than its slot"
        assert callable(call)
        done = 0
        while done < data.nbytes:
            block = data[done : done + _BLOCK]
            try:
                count = call(self._file, [block], slot.offset + done)
            except OSError as error:
                raise self._failure(what, slot, error.errno or errno.EIO) from error
            if count <= 0:
                raise self._failure(what, slot, errno.EIO)
            # A short direct transfer must go on from an aligned place.
            done += count if done + count == data.nbytes else count // _ALIGN * _ALIGN
            if count < _ALIGN and done < data.nbytes:
                raise self._failure(what, slot, errno.EIO)

    def _failure(self, what: str, slot: Slot, code: int) -> SpoolError:
        return SpoolError(
            code,
            f"could not {what} the spool file in {str(self.path)!r} "
            f"({slot.nbytes} bytes at {slot.offset}): {os.strerror(code)}. "
            "The training state on the disk tier cannot be trusted any more; "
            "check the disk and resume from the last checkpoint",
        )

    def _grow(self, end: int) -> None:
        if end <= self._end:
            return
        if self.capacity is not None and end > self.capacity:
            raise SpoolError(
                errno.ENOSPC,
                f"the disk budget of {format_bytes(self.capacity)} is too small: "
                f"{format_bytes(end)} are needed. Raise patrickstar.memory.disk.size",
            )
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, self._end, end - self._end)
            else:
                os.ftruncate(self._file, end)
        except OSError as error:
            free = 0
            with contextlib.suppress(OSError):
                stat = os.statvfs(self.path)
                free = stat.f_bavail * stat.f_frsize
            raise SpoolError(
                error.errno or errno.ENOSPC,
                f"the disk under {str(self.path)!r} is too small: the spool file needs "
                f"{format_bytes(end)}, {format_bytes(free + self._end)} are free. "
                "Free some space or put patrickstar.memory.disk.path on another disk",
            ) from error
        self._end = end


assert mmap.PAGESIZE % _ALIGN == 0
