"""In which order sharded chunks are used: what an iteration did, the next of its kind repeats.

Bookkeeping alone. The order is noted by the kind of the iteration (training, evaluation), not by
its shapes: batches may differ between ranks, the order of uses does not, since it decides about
collectives. For the same reason an iteration that departs from the order departs on all ranks; it
is not foreseen any more. Where two in a row departed, the new order is the one to expect.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import islice

Group = tuple[int, ...]
"""Chunks that are used together."""

NEVER = 1 << 62
_FAR = 256  # groups that are looked at for what comes next


@dataclass
class Order:
    """The uses of one iteration.

    Attributes:
        groups: what was used, in order; no two neighbours are alike.
        passes: the places at which a forward or a backward began.
    """

    groups: list[Group] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    _places: dict[int, list[int]] = field(default_factory=dict)

    def add(self, group: Group) -> None:
        for chunk in group:
            self._places.setdefault(chunk, []).append(len(self.groups))
        self.groups.append(group)

    def next_use(self, chunk: int, place: int) -> int:
        """Where `chunk` is used first after `place`; NEVER if it is not."""
        places = self._places.get(chunk, [])
        found = bisect_right(places, place)
        return places[found] if found < len(places) else NEVER

    @property
    def chunks(self) -> list[int]:
        return list(self._places)


class UseOrder:
    """The orders of the kinds of iterations so far, and the place in the one that runs."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Order] = {}
        self._departed: set[Hashable] = set()  # the kinds whose last iteration did
        self._kind: Hashable = None
        self._now = Order()
        self._expected: Order | None = None
        self.place = -1

    def begin(self, kind: Hashable) -> bool:
        """An iteration begins; whether it can be foreseen."""
        self._kind, self._now, self.place = kind, Order(), -1
        self._expected = self._known.get(kind)
        return self._expected is not None

    def begin_pass(self) -> None:
        """A forward or a backward begins."""
        self._now.passes.append(len(self._now.groups))

    def note(self, group: Group) -> None:
        """These chunks are used now, and others were before."""
        self.place += 1
        self._now.add(group)
        if self._expected is not None:
            groups = self._expected.groups
            if self.place >= len(groups) or groups[self.place] != group:
                self._expected = None

    def end(self, *, complete: bool) -> Order | None:
        """It is over. Returns its order if that is the one to expect from now on, and new."""
        kind, now = self._kind, self._now
        known = self._known.get(kind)
        alike = self._expected is not None and self.place + 1 == len(self._expected.groups)
        self._kind, self._now, self._expected, self.place = None, Order(), None, -1
        if not complete or not now.groups or alike:
            self._departed.discard(kind)
            return None
        if known is not None and kind not in self._departed:
            self._departed.add(kind)
            return None
        self._departed.discard(kind)
        self._known[kind] = now
        return now

    @property
    def foreseen(self) -> bool:
        """Whether the rest of this iteration is known."""
        return self._expected is not None

    def next_use(self, chunk: int, place: int | None = None) -> int:
        """Where `chunk` is used next, after `place` or now; NEVER if that is not known."""
        if self._expected is None:
            return NEVER
        return self._expected.next_use(chunk, self.place if place is None else place)

    def coming(self) -> Iterator[tuple[int, Group]]:
        """What is used next, as far as it is foreseen, with its place."""
        if self._expected is None:
            return
        first = self.place + 1
        yield from enumerate(islice(self._expected.groups, first, first + _FAR), first)
