"""What a chunk is, and what a report of the memory it takes looks like."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from patrickstar.memory.sizes import format_bytes

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
    """Bytes in use now, at most since the last reset, and allowed (None: unlimited).

    `reserved` is the length of a disk's spool file, which is taken whole before it is used.
    """

    in_use: int
    peak: int
    budget: int | None
    reserved: int = 0


@dataclass(frozen=True)
class MemoryReport:
    """`tiers` by name, and cumulative bytes `moved` by "from->to"."""

    tiers: dict[str, TierUsage]
    moved: dict[str, int]

    def __str__(self) -> str:
        """A line a tier, and one a way that bytes moved."""
        width = max(map(len, [*self.tiers, *self.moved]), default=0)
        lines = []
        for name, tier in self.tiers.items():
            limit = "no budget" if tier.budget is None else f"budget {format_bytes(tier.budget)}"
            used = f"{format_bytes(tier.in_use)} in use, peak {format_bytes(tier.peak)}"
            file = f", a file of {format_bytes(tier.reserved)}" if tier.reserved else ""
            lines.append(f"{name:<{width}}  {used}{file}, {limit}")
        lines += [f"{way:<{width}}  {format_bytes(n)} moved" for way, n in self.moved.items() if n]
        return "\n".join(lines)
