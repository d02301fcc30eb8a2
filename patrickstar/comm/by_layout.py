"""What the two ways to spread chunks have in common: collectives follow from who holds what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from patrickstar.comm import collectives
from patrickstar.comm.coalesced import Part
from patrickstar.comm.communicator import Communicator
from patrickstar.comm.layout import Layout
from patrickstar.comm.transport import Reduction
from patrickstar.comm.work import AllOf, Work


class ByLayout(ABC):
    """`ChunkComm`, given `layout`; several chunks travel one at a time."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    @abstractmethod
    def layout(self, chunk: str, numel: int) -> Layout: ...

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
