"""The disk tier: one spool file of chunk slots.

The file is private (0600) and has no name, so it is gone after the run even when the run is killed.
Where a file system cannot make such a file, one is made with a name and unlinked at once; what a
run leaves that is killed in between is swept by the next. Space is preallocated, so a disk that is
too small is found before the run and not in the middle of it. I/O is direct where the file system
allows it (the data is ours alone, read once and soon overwritten: a page cache would only double
it), in blocks, and every short read or write is either continued or reported.

A slot may lie in several stretches of the file (`extents`), so the file is never longer than what
was preallocated or the most that was in use at once, whatever sizes come and go: a budget that
counts bytes is kept. Slots of one size, the usual case, are one stretch each.

A checksum of every slot is kept in memory and compared when the slot is read, so that a disk that
returns other bytes than it was given is found out, and nobody computes with them. It is a sum at
the speed of memory, in the threads that do the I/O: a twelfth of what the disk itself takes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from patrickstar.errors import SpoolError
from patrickstar.memory.extents import Extent, FreeExtents
from patrickstar.memory.sizes import format_bytes

_ALIGN = 4096  # what direct I/O asks of offsets, lengths and addresses on today's disks
_BLOCK = 16 << 20  # one request: long enough for full bandwidth, short enough to interleave
_PREFIX, _SUFFIX = "patrickstar-", ".spool"
_LEFT = 60.0  # seconds after which a name is nobody's: it is there for microseconds
_NOT_SUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class Slot:
    """A place in the spool file: one stretch of it or several, in order."""

    extents: tuple[Extent, ...]

    @property
    def offset(self) -> int:
        """Where it begins; no other slot begins there."""
        return self.extents[0][0]

    @property
    def nbytes(self) -> int:
        return sum(length for _, length in self.extents)


class Spool:
    """A file of slots in the folder `path`, at most `capacity` bytes large (None: the disk's size).

    `read` and `write` may be called from several threads at once, for different slots;
    `allocate`, `free` and `close` belong to one thread.
    """

    def __init__(
        self, path: str | os.PathLike[str], capacity: int | None = None, *, verify: bool = True
    ) -> None:
        self.path = Path(path)
        self.capacity = capacity
        self.direct = False
        self._space = FreeExtents()  # of what is preallocated
        self._sums: dict[int, int] | None = {} if verify else None
        self._file = self._open()
        # The file's space is free when nobody has it open: also when nobody closed it.
        self._end_of_life = weakref.finalize(self, os.close, self._file)
        self._end_of_life.atexit = False

    @property
    def length(self) -> int:
        """Bytes of the file: what it has taken of the disk."""
        return self._space.end

    def _open(self) -> int:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            nameless = self._open_nameless()
            if nameless >= 0:
                return nameless
            self._sweep()
            file, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=self.path)
        except OSError as error:
            why = error.strerror or str(error)
            if isinstance(error, FileExistsError | NotADirectoryError):
                why = "it is, or lies under, a file and not a folder"
            raise SpoolError(
                error.errno or errno.EIO,
                f"cannot make a spool file in {str(self.path)!r}: {why}. "
                "Give patrickstar.memory.disk.path a folder that this user can write to",
            ) from error
        direct = -1
        try:
            if hasattr(os, "O_DIRECT"):
                with contextlib.suppress(OSError):  # the buffered file does as well
                    direct = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        finally:
            with contextlib.suppress(FileNotFoundError):  # swept by another run
                os.unlink(name)
        if direct < 0 or not _takes_direct_io(direct):
            if direct >= 0:
                os.close(direct)
            return file
        os.close(file)
        self.direct = True
        return direct

    def _open_nameless(self) -> int:
        """A file that never has a name; -1 where the system or the file system has none (NFS)."""
        kind = getattr(os, "O_TMPFILE", 0)
        if not kind:
            return -1
        kind |= os.O_RDWR | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            direct = os.open(self.path, kind | os.O_DIRECT, 0o600)
            if _takes_direct_io(direct):
                self.direct = True
                return direct
            os.close(direct)
        with contextlib.suppress(OSError):
            return os.open(self.path, kind, 0o600)
        return -1

    def _sweep(self) -> None:
        """Remove files of runs that were killed before they had unlinked theirs."""
        for left in self.path.glob(f"{_PREFIX}*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _LEFT:
                    left.unlink()

    def preallocate(self, nbytes: int, least: int | None = None) -> int:
        """Make sure that slots of `nbytes` bytes in total fit, those in use included.

        Args:
            least: what must fit where there is no room for all; `nbytes` if not given.

        Returns:
            how many bytes fit now. Of a disk that is too small for all, a twentieth is left free.

        Raises:
            SpoolError: the capacity or the disk is too small; the message says by how much.
        """
        try:
            self._grow(nbytes)
        except SpoolError:
            if least is None:
                raise
            there = self._space.end + self._free_on_disk() * 19 // 20
            if self.capacity is not None:
                there = min(there, self.capacity)
            self._grow(max(_up(least), min(there, nbytes) // _ALIGN * _ALIGN))
        return self._space.end

    def allocate(self, nbytes: int) -> Slot:
        """A slot of at least `nbytes` bytes."""
        nbytes = _up(nbytes)
        if nbytes > self._space.nbytes:
            self._grow(self._space.end + nbytes - self._space.nbytes)
        return Slot(self._space.take(nbytes))

    def free(self, slot: Slot) -> None:
        """Give a slot back."""
        if self._sums is not None:
            self._sums.pop(slot.offset, None)
        self._space.give_back(slot.extents)

    def mend(self, slots: Sequence[Slot]) -> None:
        """A change may have ended early: `slots` are in use, and nothing else is."""
        self._space.mend(extent for slot in slots for extent in slot.extents)
        if self._sums is not None:
            kept = {slot.offset for slot in slots}
            self._sums = {offset: value for offset, value in self._sums.items() if offset in kept}

    def write(self, slot: Slot, data: memoryview) -> None:
        """Write `data` (page-aligned, no longer than the slot) into `slot`."""
        if self._sums is not None:
            self._sums[slot.offset] = _checksum(data)
        self._transfer(slot, data, os.pwritev, "write to")

    def read(self, slot: Slot, data: memoryview) -> None:
        """Fill `data` (page-aligned, as long as what was written) from `slot`."""
        self._transfer(slot, data, os.preadv, "read from")
        if self._sums is not None and self._sums.get(slot.offset) != _checksum(data):
            raise self._failure(
                "read from", slot, errno.EIO, "these are not the bytes that were written there"
            )

    def close(self) -> None:
        """Close the file; its space is free from then on. Closing twice is harmless."""
        self._end_of_life()
        self._file = -1

    def _transfer(self, slot: Slot, data: memoryview, call: Callable[..., int], what: str) -> None:
        assert data.nbytes <= slot.nbytes, "data is longer than its slot"
        start = 0
        for offset, length in slot.extents:
            part = data[start : start + length]
            self._transfer_part(slot, part, offset, call, what)
            start += part.nbytes

    def _transfer_part(
        self, slot: Slot, data: memoryview, offset: int, call: Callable[..., int], what: str
    ) -> None:
        done = 0
        while done < data.nbytes:
            block = data[done : done + _BLOCK]
            try:
                count = call(self._file, [block], offset + done)
            except OSError as error:
                raise self._failure(what, slot, error.errno or errno.EIO) from error
            if done + count == data.nbytes:
                return
            # A short direct transfer must go on from an aligned place.
            count = count // _ALIGN * _ALIGN
            if count <= 0:
                raise self._failure(what, slot, errno.EIO, f"it ended after {done} bytes")
            done += count

    def _failure(self, what: str, slot: Slot, code: int, why: str | None = None) -> SpoolError:
        return SpoolError(
            code,
            f"could not {what} the spool file in {str(self.path)!r} "
            f"({slot.nbytes} bytes at {slot.offset}): {why or os.strerror(code)}. "
            "The training state on the disk tier cannot be trusted any more; "
            "check the disk and resume from the last checkpoint",
        )

    def _grow(self, end: int) -> None:
        if end <= self._space.end:
            return
        if self.capacity is not None and end > self.capacity:
            raise SpoolError(
                errno.ENOSPC,
                f"the disk budget of {format_bytes(self.capacity)} is too small: "
                f"{format_bytes(end)} are needed. Raise patrickstar.memory.disk.size",
            )
        try:
            self._extend(end)
        except OSError as error:
            with contextlib.suppress(OSError):  # what a disk gave of it before it was full
                os.ftruncate(self._file, self._space.end)
            free = self._free_on_disk()
            raise SpoolError(
                error.errno or errno.ENOSPC,
                f"the disk under {str(self.path)!r} is too small: the spool file needs "
                f"{format_bytes(end)}, {format_bytes(free + self._space.end)} are free. "
                "Free some space or put patrickstar.memory.disk.path on another disk",
            ) from error
        self._space.grow(end)

    def _free_on_disk(self) -> int:
        try:
            stat = os.statvfs(self.path)
        except OSError:
            return 0
        return stat.f_bavail * stat.f_frsize

    def _extend(self, end: int) -> None:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._file, self._space.end, end - self._space.end)
                return
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
        os.ftruncate(self._file, end)  # a file system that cannot promise space


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _takes_direct_io(file: int) -> bool:
    """Whether the file system keeps the promise it made when it opened the file."""
    with mmap.mmap(-1, _ALIGN) as page:
        try:
            return os.pwritev(file, [page], 0) == os.preadv(file, [page], 0) == _ALIGN
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)


def _checksum(data: memoryview) -> int:
    """Of whole pages: sums of 64 KiB, so that what changed places is noticed, and their hash."""
    words = torch.frombuffer(data, dtype=torch.int64)
    whole = words.numel() // 8192 * 8192
    sums = words[:whole].view(-1, 8192).sum(1).tolist()
    return hash((*sums, int(words[whole:].sum())))


assert mmap.PAGESIZE % _ALIGN == 0
