"""Who may watch the chunk memory manager, and what it is told.

An observer is handed in and hears, on the caller's thread, what changed in the books and when it
happened by `time.perf_counter`. Without one nothing is noted and nothing is paid.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from patrickstar.memory.chunk import Chunk
from patrickstar.memory.trace import Use


class Why(Enum):
    """Why a copy of a chunk left a tier."""

    PLAN = "plan"  # the plan lets it leave here
    ROOM = "room"  # something else needed the room, and the policy chose it
    ASKED = "asked"  # by the caller
    WRITTEN = "written"  # the contents changed on another tier
    RELEASED = "released"  # nobody needs the contents any more
    FAILED = "failed"  # the copy to this tier could not be completed


class Observer(Protocol):
    """Hears what a `ChunkManager` does. Tiers are numbered from the fastest, times in seconds."""

    def moment(self, uses: Sequence[Use]) -> None:
        """A different set of chunks is used from now on."""

    def placed(self, chunk: Chunk, tier: int) -> None:
        """A copy takes room on `tier`: new contents, or one that is on its way there."""

    def left(self, chunk: Chunk, tier: int, why: Why) -> None:
        """The copy on `tier` is gone and its room free."""

    def moved(self, chunk: Chunk, source: int, target: int, began: float, ended: float) -> None:
        """A copy to `target` is complete."""

    def mended(self, copies: Sequence[tuple[Chunk, int]]) -> None:
        """An interruption was mended: these copies, by chunk and tier, are all there are."""

    def waited(self, began: float, ended: float) -> None:
        """The caller stood still until a transfer ended."""

    def other(self, tier: int, nbytes: int) -> None:
        """So much of `tier` is in use by what no chunk owns."""
