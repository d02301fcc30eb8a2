"""Which sharded chunk is gathered next: what an iteration did, the next one of its kind repeats.

Bookkeeping alone. The order is noted by the key of the iteration, as plans are. It is the same on
every rank, since it depends on the order of uses and on nothing that is local to a rank; so ranks
that gather ahead do it in step, too. An iteration that departs from the order gathers nothing ahead
any more.
"""

from __future__ import annotations

from collections.abc import Hashable


class GatherOrder:
    """The orders of the kinds of iterations so far, and the place in the one that runs."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[int]] = {}
        self._key: Hashable = None
        self._now: list[int] = []
        self._expected: list[int] | None = None

    def begin(self, key: Hashable) -> bool:
        """An iteration begins; whether it can be foreseen."""
        self._key, self._now = key, []
        self._expected = self._known.get(key)
        return self._expected is not None

    def end(self, *, complete: bool) -> None:
        """It is over. If it was a complete one and none of its kind is known, it is noted."""
        if complete and self._now and self._key not in self._known:
            self._known[self._key] = self._now
        self._key, self._now, self._expected = None, [], None

    def after(self, chunk: int) -> int | None:
        """`chunk` is asked for and was not there. Returns the next, as far as can be foreseen."""
        self._now.append(chunk)
        if self._expected is None:
            return None
        place = len(self._now)
        if place > len(self._expected) or self._expected[place - 1] != chunk:
            self._expected = None
            return None
        return self._expected[place] if place < len(self._expected) else None
