"""The memory-saving mode: every chunk is held whole by one rank, one chunk travels at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from patrickstar.comm import collectives
from patrickstar.comm.coalesced import Part
from patrickstar.comm.communicator import Communicator
from patrickstar.comm.errors import CommValueError
from patrickstar.comm.layout import OwnedLayout
from patrickstar.comm.transport import Reduction
from patrickstar.comm.work import AllOf, Work


class OwnerComm:
    """`ChunkComm` with owners.

    The owner sends a chunk to every other rank and receives every rank's contribution, so its link
    carries `N - 1` times the chunk; spread ownership evenly (`layout.assign_owners`).

    Args:
        comm: the communicator.
        owners: for each chunk, which rank of the copy (0 to shard size - 1) holds it; the same
            mapping on every rank.

    Raises:
        CommValueError: an owner that is no rank of the copy.
    """

    def __init__(self, comm: Communicator, owners: Mapping[str, int]) -> None:
        self._comm = comm
        self._owners = dict(owners)
        for owner in self._owners.values():
            OwnedLayout(0, comm.shard.size, owner)  # refuses a rank outside

    def layout(self, chunk: str, numel: int) -> OwnedLayout:
        owner = self._owners.get(chunk)
        if owner is None:
            raise CommValueError(
                f"chunk {chunk!r} has no owner; the chunks with owners are {sorted(self._owners)}",
                chunk=chunk,
            )
        return OwnedLayout(numel, self._comm.shard.size, owner)

    def all_gather(self, chunk: str, full: torch.Tensor, own: torch.Tensor | None = None) -> Work:
        layout = self.layout(chunk, full.numel())
        return collectives.all_gather(self._comm, chunk, full, own, layout)

    def reduce_scatter(
        self,
        chunk: str,
        full: torch.Tensor,
        own: torch.Tensor | None = None,
        *,
        op: str = "sum",
        predivide: float | None = None,
        postdivide: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Work:
        reduction = self._reduction(op, dtype or full.dtype, predivide, postdivide)
        layout = self.layout(chunk, full.numel())
        return collectives.reduce_scatter(self._comm, chunk, full, own, layout, reduction)

    def all_reduce(
        self,
        chunk: str,
        buffer: torch.Tensor,
        *,
        op: str = "sum",
        predivide: float | None = None,
        postdivide: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Work:
        reduction = self._reduction(op, dtype or buffer.dtype, predivide, postdivide)
        return collectives.all_reduce(self._comm, chunk, buffer, reduction)

    def broadcast(self, chunk: str, buffer: torch.Tensor, src: int) -> Work:
        return collectives.broadcast(self._comm, chunk, buffer, src)

    def all_gather_many(self, parts: Sequence[Part]) -> Work:
        return AllOf([self.all_gather(part.chunk, part.full, part.own) for part in parts])

    def reduce_scatter_many(
        self,
        parts: Sequence[Part],
        *,
        op: str = "sum",
        predivide: float | None = None,
        postdivide: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Work:
        return AllOf(
            [
                self.reduce_scatter(
                    part.chunk,
                    part.full,
                    part.own,
                    op=op,
                    predivide=predivide,
                    postdivide=postdivide,
                    dtype=dtype,
                )
                for part in parts
            ]
        )

    def _reduction(
        self, op: str, wire: torch.dtype, predivide: float | None, postdivide: float | None
    ) -> Reduction:
        return Reduction.of(op, len(self._comm.topology.ranks), wire, predivide, postdivide)
