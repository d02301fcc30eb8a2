"""Collectives as the backend offers them: NCCL on GPUs; also RCCL, XCCL, and gloo for comparison.

The order in which a backend adds is its own business (deterministic for a fixed topology, but
different for all-reduce and reduce-scatter), so this transport does not promise the same bits for
differently sharded runs; `DirectTransport` does.

Parts that are not equal N-ths, a dtype that is not the wire's, and factors before the sum need a
staging buffer of the full size (allocated for the call); the plain case needs none.
What lies in padding is never read.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from patrickstar.comm.call import Turn
from patrickstar.comm.layout import Layout, OwnedLayout, ShardLayout
from patrickstar.comm.transport import (
    Allocate,
    NetworkFailure,
    Reduction,
    sum_dtype,
    to_wire,
)

# PyTorch 2.13 renamed both; the old names still work there but warn.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class NativeTransport:
    """The `Transport` of accelerator groups.

    Args:
        group: a process group of exactly the ranks that take part.
        allocate: where staging buffers come from.
        host_waits: whether a call returns when the collective has finished (CPU backends) or when
            it is queued on the current stream, in which case the group's own timeout guards it.
    """

    def __init__(self, group: dist.ProcessGroup, allocate: Allocate, host_waits: bool) -> None:
        self._group = group
        self._allocate = allocate
        self._host_waits = host_waits
        self._clobbers = dist.get_backend(group) == "gloo"

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def all_gather(
        self, turn: Turn, full: torch.Tensor, own: torch.Tensor | None, layout: Layout
    ) -> None:
        start, stop = layout.range(self.rank)
        if own is not None and own.data_ptr() != full[start:stop].data_ptr():
            full[start:stop].copy_(own[: stop - start])
        whole = full[: layout.numel]
        if isinstance(layout, OwnedLayout):
            self._run(turn, dist.broadcast, whole, group_src=layout.owner)
            return
        even = ShardLayout(layout.numel, self.size)
        assert even.range(self.rank) == (start, stop), f"{layout} is neither sharded nor owned"
        if even.padding == 0:
            self._run(turn, _all_gather, whole, whole[start:stop])
            return
        staged = self._allocate(even.padded_numel, full.dtype, full.device)
        part = even.shard_numel
        staged[self.rank * part : self.rank * part + stop - start].copy_(full[start:stop])
        self._run(
            turn, _all_gather, staged, staged[self.rank * part : (self.rank + 1) * part].clone()
        )
        whole.copy_(staged[: layout.numel])

    def reduce_scatter(
        self,
        turn: Turn,
        full: torch.Tensor,
        own: torch.Tensor,
        layout: Layout,
        reduction: Reduction,
    ) -> None:
        whole = full[: layout.numel]
        start, stop = layout.range(self.rank)
        plain = whole.dtype == reduction.wire and reduction.predivide == 1.0
        if isinstance(layout, OwnedLayout):
            # The owner's buffer is overwritten by the result; gloo also overwrites the others'.
            if not plain or self.rank == layout.owner or self._clobbers:
                staged = self._allocate(whole.numel(), reduction.wire, whole.device)
                to_wire(whole, staged, reduction.predivide)
            else:
                staged = whole
            self._run(turn, dist.reduce, staged, group_dst=layout.owner)
            result = staged[start:stop]
        else:
            even = ShardLayout(layout.numel, self.size)
            assert even.range(self.rank) == (start, stop), f"{layout} is neither sharded nor owned"
            if plain and even.padding == 0:
                staged = whole
            else:
                staged = self._allocate(even.padded_numel, reduction.wire, whole.device)
                to_wire(whole, staged[: layout.numel], reduction.predivide)
            result = self._allocate(even.shard_numel, reduction.wire, whole.device)
            self._run(turn, _reduce_scatter, result, staged)
            result = result[: stop - start]
        if reduction.postdivide != 1.0:
            result = result.to(sum_dtype(reduction.wire)).div_(reduction.postdivide)
        own.copy_(result)

    def all_reduce(self, turn: Turn, buffer: torch.Tensor, reduction: Reduction) -> None:
        if buffer.numel() == 0:
            return
        plain = buffer.dtype == reduction.wire and reduction.predivide == 1.0
        staged = buffer
        if not plain:
            staged = self._allocate(buffer.numel(), reduction.wire, buffer.device)
            to_wire(buffer, staged, reduction.predivide)
        self._run(turn, dist.all_reduce, staged)
        if reduction.postdivide != 1.0:
            staged.div_(reduction.postdivide)
        if staged is not buffer:
            buffer.copy_(staged)

    def _run(
        self, turn: Turn, collective: Callable[..., Any], *buffers: torch.Tensor, **options: Any
    ) -> None:
        try:
            if not self._host_waits:
                collective(*buffers, group=self._group, **options)
                return
            work = collective(*buffers, group=self._group, async_op=True, **options)
            work.wait(datetime.timedelta(seconds=turn.left()))
        except RuntimeError as error:
            raise NetworkFailure(str(error)) from error
