"""The collective mode: every rank holds one N-th of every chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from patrickstar.comm import coalesced, collectives
from patrickstar.comm.buckets import plan_buckets
from patrickstar.comm.coalesced import Part
from patrickstar.comm.communicator import Communicator
from patrickstar.comm.layout import ShardLayout
from patrickstar.comm.transport import Reduction
from patrickstar.comm.work import AllOf, Work

BUCKET_BYTES = 4 << 20
"""Default bytes per bucket of small chunks."""


class ShardedComm:
    """`ChunkComm` with shards.

    Args:
        comm: the communicator.
        bucket_bytes: neighbouring chunks of a `*_many` call are packed up to this size; 0 packs
            nothing.
    """

    def __init__(self, comm: Communicator, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._comm = comm
        self._bucket_bytes = bucket_bytes

    def layout(self, chunk: str, numel: int) -> ShardLayout:
        return ShardLayout(numel, self._comm.shard.size)

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
        works = []
        for bucket in self._buckets(parts, [part.full.dtype for part in parts]):
            if len(bucket) == 1:
                works.append(self.all_gather(bucket[0].chunk, bucket[0].full, bucket[0].own))
            else:
                works.append(coalesced.gather_packed(self._comm, bucket))
        return AllOf(works)

    def reduce_scatter_many(
        self,
        parts: Sequence[Part],
        *,
        op: str = "sum",
        predivide: float | None = None,
        postdivide: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Work:
        works = []
        for bucket in self._buckets(parts, [dtype or part.full.dtype for part in parts]):
            wire = dtype or bucket[0].full.dtype
            reduction = self._reduction(op, wire, predivide, postdivide)
            if len(bucket) > 1:
                works.append(coalesced.reduce_packed(self._comm, bucket, reduction))
                continue
            part = bucket[0]
            layout = self.layout(part.chunk, part.full.numel())
            works.append(
                collectives.reduce_scatter(
                    self._comm, part.chunk, part.full, part.own, layout, reduction
                )
            )
        return AllOf(works)

    def _buckets(self, parts: Sequence[Part], wires: Sequence[torch.dtype]) -> list[list[Part]]:
        sizes = [part.full.numel() * wire.itemsize for part, wire in zip(parts, wires, strict=True)]
        buckets = plan_buckets(sizes, wires, self._bucket_bytes)
        return [[parts[index] for index in bucket] for bucket in buckets]

    def _reduction(
        self, op: str, wire: torch.dtype, predivide: float | None, postdivide: float | None
    ) -> Reduction:
        return Reduction.of(op, len(self._comm.topology.ranks), wire, predivide, postdivide)
