"""The collective mode: every rank holds one N-th of every chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from patrickstar.comm import coalesced, collectives
from patrickstar.comm.buckets import plan_buckets
from patrickstar.comm.by_layout import ByLayout
from patrickstar.comm.coalesced import Part
from patrickstar.comm.communicator import Communicator
from patrickstar.comm.layout import ShardLayout
from patrickstar.comm.work import AllOf, Work

BUCKET_BYTES = 4 << 20
"""Default bytes per bucket of small chunks."""


class ShardedComm(ByLayout):
    """`ChunkComm` with shards.

    Args:
        comm: the communicator.
        bucket_bytes: neighbouring chunks of a `*_many` call are packed up to this size; 0 packs
            nothing.
    """

    def __init__(self, comm: Communicator, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(comm)
        self._bucket_bytes = bucket_bytes

    def layout(self, chunk: str, numel: int) -> ShardLayout:
        return ShardLayout(numel, self._comm.shard.size)

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
