"""The two chunks that a sharded chunk is: the full one, and this rank's part."""

from __future__ import annotations

from dataclasses import dataclass

from patrickstar.memory import Access, Chunk, Use


@dataclass(frozen=True)
class Halves:
    """A sharded chunk."""

    name: str
    full: Chunk
    own: Chunk
    start: int
    stop: int
    from_first: bool

    @property
    def to_gather(self) -> tuple[Use, Use]:
        """What filling the full chunk from the shards takes."""
        return Use(self.full.id, Access.OVERWRITE), Use(self.own.id, Access.READ)
