"""What data parallelism adds to a run: who holds which part of a chunk, and how parts travel.

The stages are DeepSpeed's (ZeRO, arXiv:1910.02054). What is sharded, so that a rank keeps one N-th
of each chunk, is nothing at 0, optimizer states at 1, gradients too at 2, and parameters too at 3.
Gradients are always reduced into shards first, in the order of the ranks, and norms are taken of
the shards; so the stages differ in what is kept and sent, and in no bit.

A run on one rank has no `Ranks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from patrickstar.comm import Communicator, ShardedComm, ShardLayout, Work
from patrickstar.memory.layout import ALIGN


@dataclass(frozen=True)
class Ranks:
    """This rank among those that train together.

    Attributes:
        comm: connects them.
        chunks: collectives on chunks.
        stage: of ZeRO, 0 to 3.
        dtype: that gradients travel in; None for their own.
        predivide: what gradients are divided by before they travel; the rest follows after.
        overlap: whether chunks travel beside the computation.
        postdivide: what their mean is divided by beside; DeepSpeed has a case of it.
        low_classes: modules whose gradients travel in `low_dtype` instead, see `safe_modules`.
    """

    comm: Communicator
    chunks: ShardedComm
    stage: int
    dtype: torch.dtype | None = None
    predivide: float | None = None
    overlap: bool = True
    postdivide: float | None = None
    low_classes: tuple[type[nn.Module], ...] = ()
    low_dtype: torch.dtype | None = None

    @property
    def size(self) -> int:
        """How many ranks share one copy of what is sharded."""
        return self.comm.topology.shard_size

    @property
    def rank(self) -> int:
        """This rank among them."""
        return self.comm.shard.rank

    @property
    def place(self) -> int:
        """This rank among all that train together, copies included."""
        return self.comm.topology.ranks.index(self.comm.rank)

    @property
    def divisor(self) -> float:
        """What the sum of a gradient over ranks is divided by."""
        return len(self.comm.topology.ranks) * (self.postdivide or 1.0)

    @property
    def is_first(self) -> bool:
        """Whether this rank decides and writes for all."""
        return self.place == 0

    @property
    def shards_states(self) -> bool:
        return self.stage >= 1

    @property
    def shards_parameters(self) -> bool:
        return self.stage >= 3

    def in_cpu_memory(self) -> Ranks:
        """The same ranks, connected anew for buffers in CPU memory; whoever asks closes `comm`."""
        comm = Communicator.open(self.comm.topology, device="cpu", timeout=self.comm.timeout)
        return replace(self, comm=comm, chunks=ShardedComm(comm))

    def padded(self, numel: int) -> int:
        """The length of a chunk of at least `numel` elements whose shards are equal and aligned."""
        step = self.size * ALIGN
        return -(-numel // step) * step

    def own(self, numel: int) -> tuple[int, int]:
        """The elements of a chunk that this rank holds."""
        return ShardLayout(numel, self.size).range(self.rank)

    def gather(self, chunk: str, full: torch.Tensor, own: torch.Tensor | None = None) -> Work:
        """Fill `full` on every rank from the parts that ranks hold; see `ChunkComm.all_gather`."""
        return self.chunks.all_gather(chunk, full, own)

    def average(
        self, chunk: str, full: torch.Tensor, own: torch.Tensor | None = None, *, low: bool = False
    ) -> Work:
        """The mean over ranks of this rank's part of `full`; see `ChunkComm.reduce_scatter`.

        Args:
            low: it travels in `low_dtype`.
        """
        dtype = self.low_dtype if low else self.dtype
        if self.postdivide is None:
            return self.chunks.reduce_scatter(
                chunk, full, own, op="avg", dtype=dtype, predivide=self.predivide
            )
        rest = self.divisor / (self.predivide or 1.0)
        return self.chunks.reduce_scatter(
            chunk, full, own, dtype=dtype, predivide=self.predivide, postdivide=rest
        )

    def from_rank(self, name: str, flat: torch.Tensor, rank: int) -> None:
        """What `rank` has in `flat`, on every rank."""
        self.chunks.broadcast(name, flat, rank).wait()

    def from_first(self, name: str, flat: torch.Tensor) -> None:
        """What the first rank has in `flat`, on every rank."""
        self.from_rank(name, flat, self.comm.topology.ranks[0])

    def anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Whether each flag is set on any rank."""
        mine = torch.tensor(flags, dtype=torch.uint8)
        table = self.comm.control.exchange("who has gradients", mine)
        return [bool(flag) for flag in table.amax(dim=0).tolist()] if flags else []

    def least(self, number: int) -> int:
        """The least of each rank's number (below 2 ** 53)."""
        return -int(self.comm.reductions.max([-float(number)])[0])

    def sum_of_shards(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over the ranks of one copy, in float64."""
        return self.comm.shard_reductions.sum(values)
