"""Pins with an owner, so that none is left when its owner is gone.

An exception can come between any two lines: a user's interrupt, a timeout's signal. Whoever pinned
a chunk may then never get to unpin it. So the pins of a `use` belong to a lease, leases that are
alive are the truth about pins, and books that were left in the middle of a change are made right
from them (`ChunkManager`). A lease that dies with pins raises doubt about the books by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from patrickstar.memory.trace import Use


class Lease:
    """The chunks of one `use`: pinned from its beginning to its end.

    Args:
        uses: what is to be pinned.
        begin, end: do the pinning and the unpinning.
        doubt: called when the lease dies without having ended.

    Attributes:
        pinned: what is pinned now.
    """

    __slots__ = ("__weakref__", "_begin", "_doubt", "_end", "pinned", "uses")

    def __init__(
        self,
        uses: tuple[Use, ...],
        begin: Callable[[Lease], None],
        end: Callable[[Lease], None],
        doubt: Callable[[], None],
    ) -> None:
        self.uses = uses
        self.pinned: list[Use] = []
        self._begin, self._end, self._doubt = begin, end, doubt

    def __enter__(self) -> None:
        self._begin(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(self)

    def __del__(self) -> None:
        if getattr(self, "pinned", None):  # none if even the making of it was interrupted
            self._doubt()
