"""Which ranks shard with each other and which replicate each other: arithmetic on rank numbers.

Hybrid sharding (the HSDP of FSDP, MiCS of arXiv:2205.00119) lays ranks out in a grid: the ranks of
a row hold the shards of one copy of the state (usually one node), the ranks of a column hold the
same shard in different copies. Sharding over all ranks is the grid with one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from patrickstar.comm.errors import CommValueError


@dataclass(frozen=True)
class Topology:
    """A grid of global ranks: `rows[i]` is the i-th sharding group.

    Raises:
        CommValueError: no ranks, rows of different lengths, or a rank that occurs twice.
    """

    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        lengths = {len(row) for row in self.rows}
        if len(lengths) != 1 or 0 in lengths:
            raise CommValueError(
                f"sharding groups must be non-empty and equally large, not {self.rows}"
            )
        if len(set(self.ranks)) != len(self.ranks):
            raise CommValueError(f"a rank occurs twice in the sharding groups {self.rows}")

    @classmethod
    def from_sizes(cls, ranks: Sequence[int], shard_size: int | None = None) -> Topology:
        """Cut `ranks` into sharding groups of `shard_size` consecutive ranks (default: all).

        `torchrun` numbers the ranks of a node consecutively, so `shard_size` = processes per node
        shards inside nodes and replicates across them.

        Raises:
            CommValueError: `shard_size` does not divide the number of ranks.
        """
        size = len(ranks) if shard_size is None else shard_size
        if size < 1 or len(ranks) % size:
            raise CommValueError(
                f"{len(ranks)} ranks cannot be cut into sharding groups of {size}; "
                f"use a divisor of {len(ranks)}"
            )
        return cls(tuple(tuple(ranks[i : i + size]) for i in range(0, len(ranks), size)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, row by row."""
        return tuple(rank for row in self.rows for rank in row)

    @property
    def shard_size(self) -> int:
        """Number of ranks that share one copy."""
        return len(self.rows[0])

    @property
    def replicas(self) -> int:
        """Number of copies."""
        return len(self.rows)

    def shard_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that `rank` shards with, itself included, in shard order."""
        return self.rows[self._place(rank)[0]]

    def replica_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same shard as `rank`, itself included, in copy order."""
        column = self._place(rank)[1]
        return tuple(row[column] for row in self.rows)

    def _place(self, rank: int) -> tuple[int, int]:
        for number, row in enumerate(self.rows):
            if rank in row:
                return number, row.index(rank)
        raise CommValueError(f"rank {rank} is not one of the ranks {self.ranks}")
