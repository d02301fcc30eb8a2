"""What a chunk is, and what a report of the memory it takes looks like."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_PAGE = 4096


@dataclass(frozen=True)
class Chunk:
    """A contiguous block of `numel` elements of one dtype; the unit of residency.

    `kind` says what it holds ("parameter", "gradient", ...) in reports.
    """

    id: int
    numel: int
    dtype: torch.dtype
    kind: str

    @property
    def nbytes(self) -> int:
        """Bytes it takes on any tier: a whole number of pages."""
        return -(-self.numel * self.dtype.itemsize // _PAGE) * _PAGE


@dataclass(frozen=True)
class TierUsage:
    """Bytes in use now, at most since the last reset, and allowed (None: unlimited)."""

    in_use: int
    peak: int
    budget: int | None


@dataclass(frozen=True)
class MemoryReport:
    """`tiers` by name, and cumulative bytes `moved` by "from->to"."""

    tiers: dict[str, TierUsage]
    moved: dict[str, int]
