"""Many small chunks in one collective: pack, run once, unpack.

Chunks of a bucket are packed rank by rank, so the packed buffer is an ordinary sharded chunk:

    [ rank 0: shard of a | shard of b | ... ][ rank 1: shard of a | shard of b | ... ] ...

with every shard padded to `ceil(numel / N)`; what lies in the padding is never read. The numbers
are those of separate collectives, since each element is added over ranks by itself. One scratch
buffer of the bucket's padded size is allocated per call (and one of an N-th of it for a reduction);
`bucket_bytes` limits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from patrickstar.comm.call import Turn
from patrickstar.comm.collectives import check_flat, check_part, reduce_into
from patrickstar.comm.communicator import Communicator
from patrickstar.comm.counters import ring_bytes
from patrickstar.comm.layout import ShardLayout
from patrickstar.comm.order import Collective
from patrickstar.comm.transport import Reduction, sum_dtype, to_wire
from patrickstar.comm.work import Work


@dataclass(frozen=True)
class Part:
    """A chunk's buffers in a coalesced call.

    Attributes:
        chunk: its name.
        full: its flat buffer.
        own: this rank's part; None: the part lies in its place in `full`.
    """

    chunk: str
    full: torch.Tensor
    own: torch.Tensor | None = None


@dataclass(frozen=True)
class _Packing:
    """Where the chunks of a bucket lie in the packed buffer."""

    layouts: tuple[ShardLayout, ...]

    @property
    def block(self) -> int:
        """Elements that each rank holds of the packed buffer."""
        return sum(layout.shard_numel for layout in self.layouts)

    @property
    def payload(self) -> int:
        """Elements without padding."""
        return sum(layout.numel for layout in self.layouts)

    @property
    def detail(self) -> str:
        """What ranks must agree on."""
        return f"{len(self.layouts)} packed chunks of {[part.numel for part in self.layouts][:8]}"

    def places(self, rank: int) -> list[tuple[int, int, int]]:
        """Return for each chunk `(place in the packed buffer, start, stop in the chunk)`."""
        place = rank * self.block
        places = []
        for layout in self.layouts:
            places.append((place, *layout.range(rank)))
            place += layout.shard_numel
        return places


def gather_packed(comm: Communicator, parts: Sequence[Part]) -> Work:
    """All-gather several sharded chunks of one dtype with one collective."""
    what = Collective.ALL_GATHER
    packing = _packing(comm, what, parts)
    dtype = parts[0].full.dtype
    shard = comm.shard

    def job(turn: Turn) -> None:
        packed = comm.allocate(packing.block * shard.size, dtype, comm.device)
        for part, (place, start, stop) in zip(parts, packing.places(shard.rank), strict=True):
            own = part.full[start:stop] if part.own is None else part.own[: stop - start]
            packed[place : place + stop - start].copy_(own)
        shard.all_gather(turn, packed, None, ShardLayout(packed.numel(), shard.size))
        for rank in range(shard.size):
            for part, (place, start, stop) in zip(parts, packing.places(rank), strict=True):
                part.full[start:stop].copy_(packed[place : place + stop - start])

    payload = packing.payload * dtype.itemsize
    return comm.submit(
        what,
        names([part.chunk for part in parts]),
        job,
        _buffers(parts),
        numel=packing.payload,
        wire=dtype,
        wire_bytes=ring_bytes(what, payload, shard.size),
        detail=packing.detail,
    )


def reduce_packed(comm: Communicator, parts: Sequence[Part], reduction: Reduction) -> Work:
    """Reduce-scatter several sharded chunks with one collective."""
    what = Collective.REDUCE_SCATTER
    packing = _packing(comm, what, parts)
    shard = comm.shard

    def job(turn: Turn) -> None:
        packed = comm.allocate(packing.block * shard.size, reduction.wire, comm.device)
        for rank in range(shard.size):
            for part, (place, start, stop) in zip(parts, packing.places(rank), strict=True):
                piece = packed[place : place + stop - start]
                to_wire(part.full[start:stop], piece, reduction.predivide)
        total = comm.allocate(packing.block, sum_dtype(reduction.wire), comm.device)
        layout = ShardLayout(packed.numel(), shard.size)
        reduce_into(comm, turn, packed, total, layout, reduction.after_only())
        base = shard.rank * packing.block
        for part, (place, start, stop) in zip(parts, packing.places(shard.rank), strict=True):
            own = part.full[start:stop] if part.own is None else part.own[: stop - start]
            own.copy_(total[place - base : place - base + stop - start])

    payload = packing.payload * reduction.wire.itemsize
    block = packing.block * reduction.wire.itemsize
    return comm.submit(
        what,
        names([part.chunk for part in parts]),
        job,
        _buffers(parts),
        numel=packing.payload,
        wire=reduction.wire,
        wire_bytes=ring_bytes(what, payload, shard.size)
        + ring_bytes(Collective.ALL_REDUCE, block, comm.topology.replicas),
        detail=f"{packing.detail}, {reduction}",
    )


def names(chunks: Sequence[str]) -> str:
    """Return one name for a bucket of chunks, naming the first few."""
    shown = " + ".join(chunks[:3])
    return shown if len(chunks) <= 3 else f"{shown} + {len(chunks) - 3} more"


def _packing(comm: Communicator, what: Collective, parts: Sequence[Part]) -> _Packing:
    layouts = tuple(ShardLayout(part.full.numel(), comm.shard.size) for part in parts)
    for part, layout in zip(parts, layouts, strict=True):
        check_flat(what, part.chunk, part.full)
        check_part(what, part.chunk, part.own, layout, comm.shard.rank)
    return _Packing(layouts)


def _buffers(parts: Sequence[Part]) -> list[torch.Tensor]:
    return [part.full for part in parts] + [part.own for part in parts if part.own is not None]
