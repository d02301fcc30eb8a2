"""Which tensor lies where in which chunk: arithmetic on element counts.

Tensors keep their order, since that is roughly the order of use, and are packed until the next one
does not fit. Each starts at a multiple of `ALIGN` elements, so that kernels see the alignment that
ordinary allocation gives them (64 bytes for the narrowest dtype, 16 bits) and take the same path
to the same bits. A chunk is as long as its contents; `limit` is the most it may hold. A tensor
longer than the limit gets a chunk of its own length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 32


@dataclass(frozen=True)
class Placement:
    """The chunk (by position) and the offset in it, in elements, of one tensor."""

    chunk: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """Where every tensor lies, and how long every chunk is, in elements."""

    placements: list[Placement]
    lengths: list[int]
    used: int

    @property
    def utilisation(self) -> float:
        """The share of chunk memory that tensors fill; the rest is alignment."""
        return self.used / sum(self.lengths) if self.lengths else 1.0


def pack(numels: Sequence[int], limit: int) -> Layout:
    """Lay tensors of `numels` elements into chunks of at most `limit` elements, in order."""
    placements: list[Placement] = []
    lengths: list[int] = []
    for numel in numels:
        padded = -(-numel // ALIGN) * ALIGN
        if not lengths or lengths[-1] + padded > limit:
            lengths.append(0)
        placements.append(Placement(len(lengths) - 1, lengths[-1]))
        lengths[-1] += padded
    return Layout(placements, lengths, sum(numels))


def choose_limit(
    numels: Sequence[int],
    bytes_per_element: int,
    budget: int | None,
    *,
    smallest: int = 1 << 13,
    largest: int = 1 << 23,
) -> int:
    """The chunk length, in elements, for tensors of `numels` under `budget` bytes.

    An optimizer step holds `bytes_per_element` for every element of one chunk, reads the next and
    writes the last meanwhile: a twelfth of the budget for each leaves most of it to the chunks
    that stay. Longer chunks make better disk requests, up to `largest` (32 MiB in fp32), and among
    the lengths up to a quarter below the best that wastes least is taken.
    """
    if not numels:
        return smallest
    limit = largest
    if budget is not None:
        limit = min(limit, max(smallest, budget // (12 * bytes_per_element)))
    limit = min(limit, -(-sum(-(-n // ALIGN) * ALIGN for n in numels) // ALIGN) * ALIGN)
    limit = max(limit, ALIGN)
    candidates = {max(ALIGN, limit * share // 64 // ALIGN * ALIGN) for share in range(48, 65)}

    def cost(candidate: int) -> tuple[int, int]:
        layout = pack(numels, candidate)
        # Chunks that end early make more, shorter requests: count them as waste too.
        return (len(layout.lengths) * candidate - layout.used, -candidate)

    return min(candidates, key=cost)
