"""Who holds which elements of a chunk: frozen arithmetic, no tensors, no processes.

A chunk of `numel` elements is held by `world_size` ranks in one of two ways, both described by one
half-open range per rank that tile `[0, numel)` without overlap:

- `ShardLayout`: every rank holds one N-th. The shard length is `ceil(numel / N)`, so that all ranks
  but the last ones hold equally much; where N does not divide `numel`, the last non-empty rank
  holds less and ranks behind it may hold nothing. `padded_numel = N * shard_numel` is what a
  collective that insists on equal parts needs; it is always less than `numel + N`.
- `OwnedLayout`: one rank holds it all.

The same ranges drive all-gather, reduce-scatter, checkpoints and tests, so this file knows nothing
else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from patrickstar.comm.errors import CommValueError


class Layout(Protocol):
    """The parts of one chunk, in elements."""

    @property
    def numel(self) -> int:
        """Elements of the whole chunk."""

    @property
    def world_size(self) -> int:
        """Number of ranks that hold a part."""

    def range(self, rank: int) -> tuple[int, int]:
        """Return the half-open range of elements that `rank` holds; empty ranges are allowed."""


@dataclass(frozen=True)
class ShardLayout:
    """Every rank holds one N-th of the chunk.

    Args:
        numel: elements of the chunk, at least 0.
        world_size: number of ranks, at least 1.

    Raises:
        CommValueError: a number out of range.
    """

    numel: int
    world_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.numel, self.world_size)

    @property
    def shard_numel(self) -> int:
        """Elements of every rank's padded shard: `ceil(numel / world_size)`."""
        return -(-self.numel // self.world_size)

    @property
    def padded_numel(self) -> int:
        """Elements of the chunk padded to equal shards: `world_size * shard_numel`."""
        return self.world_size * self.shard_numel

    @property
    def padding(self) -> int:
        """Elements of `padded_numel` that belong to nobody; less than `world_size`."""
        return self.padded_numel - self.numel

    def range(self, rank: int) -> tuple[int, int]:
        """Return the range of elements that `rank` holds, without padding."""
        _check_rank(rank, self.world_size)
        start = min(rank * self.shard_numel, self.numel)
        return start, min(start + self.shard_numel, self.numel)

    def owner(self, element: int) -> int:
        """Return the rank that holds `element`.

        Raises:
            CommValueError: the chunk has no such element.
        """
        if not 0 <= element < self.numel:
            raise CommValueError(f"element {element} is outside a chunk of {self.numel} elements")
        return element // self.shard_numel


@dataclass(frozen=True)
class OwnedLayout:
    """One rank holds the whole chunk, the others hold nothing.

    Args:
        numel: elements of the chunk, at least 0.
        world_size: number of ranks, at least 1.
        owner: the rank that holds it.

    Raises:
        CommValueError: a number out of range.
    """

    numel: int
    world_size: int
    owner: int

    def __post_init__(self) -> None:
        _check_sizes(self.numel, self.world_size)
        _check_rank(self.owner, self.world_size)

    def range(self, rank: int) -> tuple[int, int]:
        """Return `(0, numel)` for the owner and an empty range for every other rank."""
        _check_rank(rank, self.world_size)
        return (0, self.numel) if rank == self.owner else (0, 0)


def assign_owners(numels: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Give every chunk one owner so that ranks hold about equally much.

    Greedy, largest chunk first, to the rank that holds least (Graham's LPT rule: the fullest rank
    holds at most 4/3 - 1/(3N) of the optimum; SIAM J. Appl. Math. 17(2), 1969). Ties go to the
    lower rank and the earlier name, so that every rank computes the same answer.

    Args:
        numels: elements of each chunk by name.
        world_size: number of ranks, at least 1.

    Returns:
        The owner of each chunk, in the order of `numels`.
    """
    held = [0] * world_size
    owners: dict[str, int] = {}
    for name in sorted(numels, key=lambda name: (-numels[name], name)):
        _check_sizes(numels[name], world_size)
        rank = held.index(min(held))
        held[rank] += numels[name]
        owners[name] = rank
    return {name: owners[name] for name in numels}


def _check_sizes(numel: int, world_size: int) -> None:
    if numel < 0:
        raise CommValueError(f"a chunk cannot have {numel} elements")
    if world_size < 1:
        raise CommValueError(f"a chunk needs at least one rank, not {world_size}")


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise CommValueError(
            f"rank {rank} is not one of the {world_size} ranks 0..{world_size - 1}"
        )
