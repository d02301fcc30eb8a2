"""Keeping the process, and not only the books, inside a memory budget.

Memory that no chunk owns comes from the C library's heap, and the heap keeps what is freed, for the
next allocation; after an iteration of a transformer it was seen to hold twice what was ever in use
at once. That is good as long as nobody else needs the room. When chunks do, free heap pages are
given back to the system. What the process really holds is asked of the system, not estimated.

They are given back when a run is over, too: a process that goes on with something else after an
engine is closed has the memory.

Who says when also says when not. Left to itself the C library gives the free end of its heap back
whenever that is long, which in a backward is all the time, and the next operators fault the same
pages in again; so it is told not to.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping

from patrickstar.memory.arena import PAGE

_SLACK = 176 << 20  # let pass: giving back costs milliseconds, and faults for what is used again
_STEP = 16 << 20  # and beyond what was found in use, so that the two do not add up

# Of mallopt(3). Blocks beyond the second are mappings of their own, which go back when they are
# freed; it is as far as the C library itself goes when it adapts the figure to what it sees.
_M_TRIM_THRESHOLD, _NEVER = -1, -1
_M_MMAP_THRESHOLD, _LARGEST = -3, 32 << 20
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_free_pages(environment: Mapping[str, str]) -> bool:
    """Have the C library keep what is freed until `give_back_free_pages`; whether it will.

    This holds for the whole process, for good. It is left alone where the user has set it up in
    `environment`, by a variable of mallopt(3) or in GLIBC_TUNABLES; one such setting already ends
    the library's own adapting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    theirs = any(name in environment for name in _CHOSEN)
    theirs = theirs or "glibc.malloc." in environment.get("GLIBC_TUNABLES", "")
    if mallopt is None or theirs:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


def give_back_free_pages() -> None:
    """Give all free heap pages of this process back to the system; costs some milliseconds.

    A C library that has no call for it (musl, macOS) keeps them for the next allocation.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class ProcessHeap:
    """The memory of this process beyond what it held when this object was made."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._statm = -1
        if os.path.exists("/proc/self/statm"):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
            self._end_of_life = weakref.finalize(self, os.close, self._statm)
            self._end_of_life.atexit = False
        self._start = self._resident()
        self._floor = 0

    def keep_within(self, limit: int, coming: int = 0) -> None:
        """Give free heap pages back if the process has grown by more than `limit` bytes.

        Args:
            coming: bytes that will be allocated before this is asked again.
        """
        if self._statm < 0 or self._trim is None:
            return
        grown = self._resident() - self._start
        self._floor = min(self._floor, grown)  # what was in use once may be free by now
        if grown + coming > max(limit + _SLACK, self._floor + _STEP):
            self._trim(0)
            # What is still held is in use; do not try again before there is more.
            self._floor = self._resident() - self._start

    def _resident(self) -> int:
        if self._statm < 0:
            return 0
        return int(os.pread(self._statm, 128, 0).split()[1]) * PAGE

    def close(self) -> None:
        if self._statm >= 0:
            self._end_of_life()
            self._statm = -1
