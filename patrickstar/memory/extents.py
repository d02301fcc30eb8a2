"""Which bytes of a file are free, and which of them a slot gets.

A slot gets one extent where one is long enough: the tightest, so that long ones stay long. Where
none is, it gets several, as few as there can be. So whatever fits by the count of bytes is placed,
whatever was given back in between, and the file need never be longer than the most that was in use
at once: a disk budget can count bytes and knows nothing of gaps.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable

Extent = tuple[int, int]
"""A stretch of a file: its offset and its length, in bytes."""


class FreeExtents:
    """The free bytes of a file that begins empty and only grows.

    Attributes:
        free: in order, never adjacent.
        end: the length of the file.
        nbytes: how many are free.
    """

    def __init__(self) -> None:
        self.free: list[Extent] = []
        self.end = 0
        self.nbytes = 0

    def grow(self, end: int) -> None:
        """The file ends at `end` now; what is new is free."""
        start, self.end = self.end, end
        self._give(start, end - start)

    def take(self, nbytes: int) -> tuple[Extent, ...]:
        """Extents of `nbytes` bytes in all, in order; there are so many free."""
        assert 0 < nbytes <= self.nbytes, "more is taken than is free"
        taken: list[Extent] = []
        while nbytes:
            fitting = [(length, offset) for offset, length in self.free if length >= nbytes]
            if fitting:
                length, offset = min(fitting)
            else:
                length, offset = max((length, -offset) for offset, length in self.free)
                offset = -offset
            part = min(length, nbytes)
            place = bisect(self.free, (offset, length)) - 1
            self.free[place : place + 1] = [(offset + part, length - part)] if part < length else []
            self.nbytes -= part
            nbytes -= part
            taken.append((offset, part))
        return tuple(sorted(taken))

    def give_back(self, extents: Iterable[Extent]) -> None:
        """Extents that were taken are free again."""
        for offset, length in extents:
            self._give(offset, length)

    def mend(self, in_use: Iterable[Extent]) -> None:
        """A change may have ended early: these are in use, and nothing else is."""
        self.free, self.nbytes, end = [], 0, 0
        for offset, length in sorted(in_use):
            self._give(end, offset - end)
            end = offset + length
        self._give(end, self.end - end)

    def _give(self, start: int, length: int) -> None:
        if not length:
            return
        self.nbytes += length
        place = bisect(self.free, (start, length))
        if place < len(self.free) and self.free[place][0] == start + length:
            length += self.free.pop(place)[1]
        if place and sum(self.free[place - 1]) == start:
            place -= 1
            start, longer = self.free.pop(place)
            length += longer
        self.free.insert(place, (start, length))
