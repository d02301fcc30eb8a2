"""Pages that no buffer in use needs and the process still holds: where they lie, and who is next.

A *region* of a buffer is a range that is parked and taken as one kind: whole huge pages, or the
ordinary pages behind the last of them. A pool has the regions of one kind. Pages are taken from a
region's end, so what is left always begins where the region begins.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Place(Protocol):
    """What pages lie under."""

    @property
    def address(self) -> int: ...


P = TypeVar("P", bound=Place)


@dataclass(slots=True)
class Region(Generic[P]):
    """The bytes from `start` to `end` of `buffer` are parked."""

    buffer: P
    start: int
    end: int


class ParkedPages(Generic[P]):
    """The parked regions of one kind, oldest first.

    Args:
        unit: regions are whole multiples of so many bytes, and taken in such.

    Attributes:
        nbytes: of all regions.
    """

    def __init__(self, unit: int) -> None:
        self.unit, self.nbytes = unit, 0
        self._regions: OrderedDict[int, Region[P]] = OrderedDict()
        self._full: dict[int, dict[int, Region[P]]] = {}  # those nothing was taken from, by size

    def __bool__(self) -> bool:
        return bool(self._regions)

    def __contains__(self, buffer: P) -> bool:
        return buffer.address in self._regions

    def park(self, buffer: P, start: int, end: int) -> None:
        region = self._regions[buffer.address] = Region(buffer, start, end)
        self._full.setdefault(end - start, {})[buffer.address] = region
        self.nbytes += end - start

    def of(self, buffer: P) -> Region[P] | None:
        return self._regions.get(buffer.address)

    def full(self, nbytes: int) -> Region[P] | None:
        """The oldest region that was parked with `nbytes` bytes and still has them."""
        alike = self._full.get(nbytes)
        return next(iter(alike.values())) if alike else None

    def oldest(self) -> Region[P]:
        return next(iter(self._regions.values()))

    def take(self, region: Region[P], nbytes: int) -> None:
        """The last `nbytes` bytes of `region` are not parked any more."""
        address = region.buffer.address
        self._full.get(region.end - region.start, {}).pop(address, None)
        region.end -= nbytes
        self.nbytes -= nbytes
        if region.end == region.start:
            del self._regions[address]

    def clear(self) -> None:
        self._regions.clear()
        self._full.clear()
        self.nbytes = 0
