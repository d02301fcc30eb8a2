"""What stays gathered and what is gathered next, decided from the order of uses alone.

Bookkeeping: `sharding` tells what is used and what is there, and asks what to give up for a chunk
that is needed now, and which one may come ahead. Both follow Belady's rule within a room in bytes
(see `gather_room`). What comes ahead makes it no worse: for the next chunk that is missing, only
that is given up which would be given up at the moment it is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

from patrickstar.engine.gather_room import least_room
from patrickstar.engine.use_order import Group, UseOrder


@dataclass(frozen=True)
class Room:
    """Bytes of chunks that stay gathered, those on their way included.

    Attributes:
        floor: what the first iteration was granted.
        granted: what may be used.
        depth: how many chunks may be on their way at a time.
    """

    floor: int
    granted: int
    depth: int = 1


class Foresight:
    """The order of uses of sharded chunks.

    Args:
        sizes: bytes of every chunk; it may grow.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._sizes = sizes
        self._order = UseOrder()
        self._group: Group = ()
        self._kind: Hashable = None
        self._rooms: dict[Hashable, Room] = {}
        self._most_held = 0

    def begin(self, kind: Hashable) -> bool:
        """An iteration begins; whether it is foreseen."""
        self._kind, self._group, self._most_held = kind, (), 0
        return self._order.begin(kind)

    def begin_pass(self) -> None:
        """A forward or a backward begins."""
        self._order.begin_pass()
        self._group = ()

    def used(self, group: Group) -> bool:
        """These are used now; whether others were before."""
        if group == self._group:
            return False
        self._group = group
        self._order.note(group)
        return True

    def held(self, there: Collection[int]) -> None:
        """These are gathered or on their way."""
        self._most_held = max(self._most_held, self._bytes(there))

    def end(self, *, complete: bool, ahead: int, extra: int) -> None:
        """The iteration is over; if its order is new, choose the room for the next of its kind.

        Args:
            ahead: bytes that were set aside for a chunk that comes ahead; 0 if none will.
            extra: bytes that there is room for beside what the first iteration took.
        """
        kind, order = self._kind, self._order.end(complete=complete)
        self._kind, self._group = None, ()
        if order is None:
            return
        known = self._rooms.get(kind)
        floor = self._most_held + ahead if known is None else known.floor
        wanted = max(least_room(order, self._sizes), floor + ahead)
        granted = min(wanted, floor + extra)
        self._rooms[kind] = Room(floor, max(granted, floor), 2 if granted >= floor + ahead else 1)

    @property
    def group(self) -> Group:
        """What is used now."""
        return self._group

    @property
    def foreseen(self) -> bool:
        """Whether the rest of this iteration is known."""
        return self._order.foreseen

    @property
    def room(self) -> Room:
        """Of this kind of iterations, once one of them is foreseen."""
        return self._rooms[self._kind]

    def victims(self, coming: int, there: Collection[int], free: Collection[int]) -> list[int]:
        """What to give up for `coming`, which is needed now.

        Args:
            there: what is gathered or on its way.
            free: what of it may be given up.
        """
        over = self._bytes({*there, coming}) - self.room.granted
        last_first = sorted(free, key=self._order.next_use, reverse=True)
        return self._enough(last_first, over)

    def ahead(self, there: Collection[int], free: Collection[int]) -> tuple[int, list[int]] | None:
        """What may be gathered ahead now, and what is given up for it; None for nothing.

        Args: as for `victims`.
        """
        between: set[int] = set(self._group)
        for place, group in self._order.coming():
            between.update(group)
            for chunk in group:
                if chunk not in there:
                    return self._making_way(chunk, place, between, there, free)
        return None

    def _making_way(
        self,
        chunk: int,
        place: int,
        between: set[int],
        there: Collection[int],
        free: Collection[int],
    ) -> tuple[int, list[int]] | None:
        over = self._bytes({*there, chunk}) - self.room.granted

        def key(other: int) -> tuple[int, bool]:
            return self._order.next_use(other, place), other not in between

        victims = self._enough(sorted(there, key=key, reverse=True), over)
        if sum(self._sizes[victim] for victim in victims) < over:
            return None
        may_go = all(victim in free and victim not in between for victim in victims)
        return (chunk, victims) if may_go else None

    def _enough(self, candidates: list[int], over: int) -> list[int]:
        chosen = []
        for chunk in candidates:
            if over <= 0:
                break
            chosen.append(chunk)
            over -= self._sizes[chunk]
        return chosen

    def _bytes(self, chunks: Collection[int]) -> int:
        return sum(self._sizes[chunk] for chunk in chunks)
