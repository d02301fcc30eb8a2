"""The chunk collectives as plain functions over a communicator; the modes are built from them.

Each checks its arguments on the caller's thread, before anything is sent, and submits one job.
With several copies (hybrid sharding), gathers stay inside the copy and reductions go on across
copies before they are divided and rounded.
"""

from __future__ import annotations

import torch

from patrickstar.comm.call import Turn
from patrickstar.comm.communicator import Communicator
from patrickstar.comm.counters import ring_bytes
from patrickstar.comm.errors import CommValueError
from patrickstar.comm.layout import Layout, OwnedLayout, ShardLayout
from patrickstar.comm.order import Collective
from patrickstar.comm.transport import Reduction, sum_dtype, to_wire
from patrickstar.comm.work import Work


def all_gather(
    comm: Communicator, chunk: str, full: torch.Tensor, own: torch.Tensor | None, layout: Layout
) -> Work:
    """Fill `full` on every rank of the copy from the parts that `layout` gives its ranks."""
    what = Collective.ALL_GATHER
    check_flat(what, chunk, full)
    check_part(what, chunk, own, layout, comm.shard.rank)
    shard = comm.shard

    def job(turn: Turn) -> None:
        shard.all_gather(turn, full, own, layout)

    payload = layout.numel * full.dtype.itemsize
    return comm.submit(
        what,
        chunk,
        job,
        [full] if own is None else [full, own],
        numel=layout.numel,
        wire=full.dtype,
        wire_bytes=ring_bytes(what, payload, shard.size),
        detail=describe(layout),
    )


def reduce_scatter(
    comm: Communicator,
    chunk: str,
    full: torch.Tensor,
    own: torch.Tensor | None,
    layout: Layout,
    reduction: Reduction,
) -> Work:
    """Write the part that `layout` gives this rank of the sum of `full` over all ranks."""
    what = Collective.REDUCE_SCATTER
    check_flat(what, chunk, full)
    check_part(what, chunk, own, layout, comm.shard.rank)
    start, stop = layout.range(comm.shard.rank)
    out = full[start:stop] if own is None else own[: stop - start]

    def job(turn: Turn) -> None:
        reduce_into(comm, turn, full, out, layout, reduction)

    return comm.submit(
        what,
        chunk,
        job,
        [full, out],
        numel=layout.numel,
        wire=reduction.wire,
        wire_bytes=reduce_scatter_bytes(comm, layout, reduction),
        detail=f"{describe(layout)}, {reduction}",
    )


def reduce_into(
    comm: Communicator,
    turn: Turn,
    full: torch.Tensor,
    out: torch.Tensor,
    layout: Layout,
    reduction: Reduction,
) -> None:
    """The blocking part of a reduce-scatter: inside the copy, then across copies."""
    if comm.across is None:
        comm.shard.reduce_scatter(turn, full, out, layout, reduction)
        return
    kept = sum_dtype(reduction.wire)
    total = out if out.dtype == kept else comm.allocate(out.numel(), kept, out.device)
    comm.shard.reduce_scatter(turn, full, total, layout, reduction.before_only())
    comm.across.all_reduce(turn, total, reduction.after_only())
    if total is not out:
        out.copy_(total)


def all_reduce(comm: Communicator, chunk: str, buffer: torch.Tensor, reduction: Reduction) -> Work:
    """Replace `buffer` by its reduction over all ranks, the same bits on every rank."""
    what = Collective.ALL_REDUCE
    check_flat(what, chunk, buffer)
    layout = ShardLayout(buffer.numel(), comm.shard.size)

    def job(turn: Turn) -> None:
        if comm.across is None:
            comm.shard.all_reduce(turn, buffer, reduction)
            return
        staged = buffer
        if buffer.dtype != reduction.wire:
            # Staged as a whole so that the gather travels in the wire dtype as well.
            staged = comm.allocate(buffer.numel(), reduction.wire, buffer.device)
            to_wire(buffer, staged, reduction.predivide)
        rest = reduction if staged is buffer else reduction.after_only()
        start, stop = layout.range(comm.shard.rank)
        reduce_into(comm, turn, staged, staged[start:stop], layout, rest)
        comm.shard.all_gather(turn, staged, None, layout)
        if staged is not buffer:
            buffer.copy_(staged)

    payload = buffer.numel() * reduction.wire.itemsize
    gathered = ring_bytes(Collective.ALL_GATHER, payload, comm.shard.size)
    return comm.submit(
        what,
        chunk,
        job,
        [buffer],
        numel=buffer.numel(),
        wire=reduction.wire,
        wire_bytes=reduce_scatter_bytes(comm, layout, reduction) + gathered,
        detail=str(reduction),
    )


def broadcast(comm: Communicator, chunk: str, buffer: torch.Tensor, src: int) -> Work:
    """Copy `buffer` from global rank `src` to every rank."""
    what = Collective.BROADCAST
    check_flat(what, chunk, buffer)
    topology = comm.topology
    if src not in topology.ranks:
        raise CommValueError(
            f"{what} of chunk {chunk!r}: rank {src} is not one of {topology.ranks}",
            collective=what,
            chunk=chunk,
        )
    copies = topology.replica_ranks(src)
    place = topology.shard_ranks(src).index(src)

    def job(turn: Turn) -> None:
        if comm.across is not None and comm.rank in copies:
            owned = OwnedLayout(buffer.numel(), comm.across.size, copies.index(src))
            comm.across.all_gather(turn, buffer, None, owned)
        comm.shard.all_gather(
            turn, buffer, None, OwnedLayout(buffer.numel(), comm.shard.size, place)
        )

    payload = buffer.numel() * buffer.dtype.itemsize
    return comm.submit(
        what,
        chunk,
        job,
        [buffer],
        numel=buffer.numel(),
        wire=buffer.dtype,
        wire_bytes=ring_bytes(what, payload, len(topology.ranks)),
        detail=f"from rank {src}",
    )


def reduce_scatter_bytes(comm: Communicator, layout: Layout, reduction: Reduction) -> int:
    """Return a reduce-scatter's bytes in the ring model, both levels (see `counters.py`)."""
    payload = layout.numel * reduction.wire.itemsize
    inside = ring_bytes(Collective.REDUCE_SCATTER, payload, comm.shard.size)
    part = payload // comm.shard.size
    return inside + ring_bytes(Collective.ALL_REDUCE, part, comm.topology.replicas)


def describe(layout: Layout) -> str:
    """Return what ranks must agree on about who holds what, besides the size."""
    return f"owner {layout.owner}" if isinstance(layout, OwnedLayout) else "sharded"


def check_flat(collective: Collective, chunk: str, buffer: torch.Tensor) -> None:
    """Raise unless `buffer` is a flat contiguous tensor.

    Raises:
        CommValueError: it is not.
    """
    if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.requires_grad:
        raise CommValueError(
            f"{collective} of chunk {chunk!r} needs a 1-D contiguous buffer without requires_grad, "
            f"not shape {tuple(buffer.shape)} with strides {buffer.stride()}; use "
            "flat.detach().view(-1)",
            collective=collective,
            chunk=chunk,
        )


def check_part(
    collective: Collective, chunk: str, own: torch.Tensor | None, layout: Layout, rank: int
) -> None:
    """Raise unless `own` is a flat tensor with room for this rank's part of `layout`.

    Raises:
        CommValueError: it is not.
    """
    if own is None:
        return
    check_flat(collective, chunk, own)
    start, stop = layout.range(rank)
    room = layout.shard_numel if isinstance(layout, ShardLayout) else stop - start
    if own.numel() not in (stop - start, room):
        raise CommValueError(
            f"{collective} of chunk {chunk!r}: this rank's part is {stop - start} elements "
            f"({start}..{stop} of {layout.numel}), the buffer given for it has {own.numel()}",
            collective=collective,
            chunk=chunk,
        )
