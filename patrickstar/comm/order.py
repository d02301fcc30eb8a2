"""The agreed order of a step's collectives: names, merging, fingerprints. No processes.

A collective finishes only when every rank takes part in it, so ranks must issue the same
collectives in the same order. A `Slot` is one place in that order: a collective and the chunk it
works on. A slot may occur several times in a step (a chunk is gathered for the forward and again
for the backward); the n-th request for it means its n-th place.
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Collective(str, enum.Enum):
    """The chunk collectives, by the name that errors and counters use."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    BROADCAST = "broadcast"

    def __str__(self) -> str:
        return self.value

    @property
    def contributes(self) -> bool:
        """Whether a rank that is absent leaves its contribution out of the result."""
        return self in (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)


class Slot(NamedTuple):
    """One place in the order: a collective on a chunk."""

    collective: Collective
    chunk: str

    def __str__(self) -> str:
        return f"{self.collective} of chunk {self.chunk!r}"


def fingerprint(order: Sequence[Slot]) -> int:
    """Return a non-negative 63-bit number that differs for different orders (SHA-256)."""
    digest = hashlib.sha256()
    for slot in order:
        digest.update(f"{slot.collective}\0{slot.chunk}\0".encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def merge_orders(orders: Sequence[Sequence[Slot]]) -> list[Slot]:
    """Merge what each rank observed into one order that has room for all of them.

    The first rank's order is kept as it is. A slot that only a later rank has, or has more often,
    goes right behind the slot that precedes it on that rank. Every rank that merges the same lists
    gets the same answer.

    Args:
        orders: one list per rank, in rank order.

    Returns:
        An order that holds each slot as often as the rank that has it most often.
    """
    merged: list[Slot] = []
    for order in orders:
        room = Counter(merged)
        place = 0
        seen: Counter[Slot] = Counter()
        for slot in order:
            seen[slot] += 1
            if seen[slot] > room[slot]:
                merged.insert(place, slot)
                place += 1
            else:
                place = max(place, _nth(merged, slot, seen[slot]) + 1)
    return merged


def _nth(slots: Sequence[Slot], wanted: Slot, nth: int) -> int:
    """Return the place of the `nth` (from 1) occurrence of `wanted`."""
    places = (place for place, slot in enumerate(slots) if slot == wanted)
    for _ in range(nth - 1):
        next(places)
    return next(places)
