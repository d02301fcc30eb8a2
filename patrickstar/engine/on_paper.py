"""Building a model on paper: which chunks are used while it is built and moved into its layout.

While a model is built its parameters lie in construction chunks; then each moves to its final
chunk, and a construction chunk is given up when its last parameter has left it. Played by the
planner, that says what building takes, as the trace of an iteration says what training takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from patrickstar.engine.construct import may_be_managed
from patrickstar.engine.home import ChunkHome
from patrickstar.engine.parameter import ManagedParameter
from patrickstar.engine.pieces import rows_per_piece, split
from patrickstar.engine.state import ModelState
from patrickstar.memory import Access, ChunkManager, CpuTier, Moment, Trace, Use
from patrickstar.memory.layout import ALIGN


def manage_on_paper(module: nn.Module) -> list[nn.Parameter]:
    """Take ordinary parameters of `module` for managed ones, though they are in no chunk.

    Returns:
        those that were ordinary.
    """
    manager = ChunkManager([CpuTier("host", None)])
    home = ChunkHome(manager)
    manager.close()
    taken = [p for p in module.parameters() if may_be_managed(p)]
    for parameter in taken:
        parameter.__class__ = ManagedParameter
        parameter._home = home  # type: ignore[attr-defined]
    return taken


def split_on_paper(module: nn.Module, piece_size: int) -> None:
    """Keep the parameters of `module` in pieces that a run would keep so; they have no data."""
    manager = ChunkManager([CpuTier("host", None)])
    home = ChunkHome(manager)
    manager.close()

    def adopt(piece: nn.Parameter) -> None:
        piece.__class__ = ManagedParameter
        piece._home = home  # type: ignore[attr-defined]

    for parameter in module.parameters():
        rows = rows_per_piece(parameter.shape, piece_size)
        if rows is not None and may_be_managed(parameter) and parameter.is_contiguous():
            split(parameter, rows, home, adopt)


@contextmanager
def managed_on_paper(module: nn.Module) -> Iterator[None]:
    """The same for a while."""
    taken = manage_on_paper(module)
    try:
        yield
    finally:
        for parameter in taken:
            parameter.__class__ = nn.Parameter
            parameter.__dict__.pop("_home", None)


def building_trace(
    state: ModelState, dtypes: Mapping[str, torch.dtype], length: int, base: int
) -> tuple[Trace, dict[int, int]]:
    """The trace of building a model into `state`, and the bytes of every chunk in it.

    Args:
        dtypes: of the parameters as they are built, by the names of their slots.
        length: the longest construction chunk, in elements, but for longer parameters.
        base: bytes that are there and no chunk owns.
    """
    sizes = {chunk.id: chunk.nbytes for a in state.aligned for chunk in a.chunks()}
    slots = sorted((slot for _, slot in state.slots.values()), key=lambda slot: slot.index)
    source: dict[int, int] = {}
    left: dict[int, int] = {}
    ends: dict[torch.dtype, tuple[int, int]] = {}
    moments: list[Moment] = []
    for slot in slots:
        dtype = dtypes[slot.name]
        padded = -(-slot.numel // ALIGN) * ALIGN
        chunk, end = ends.get(dtype, (0, length))
        if padded > length or end + padded > length:
            chunk, end = -1 - len(left), 0
            sizes[chunk] = max(padded if padded > length else length, ALIGN) * dtype.itemsize
            left[chunk] = 0
        if padded <= length:
            ends[dtype] = chunk, end + padded
        source[slot.index] = chunk
        left[chunk] += 1
        access = Access.UPDATE if left[chunk] > 1 else Access.OVERWRITE
        moments.append(Moment((Use(chunk, access),), {0: base}))
    begun: set[int] = set()
    for aligned in state.aligned:
        chunks = {aligned.parameter.id: 0}
        if aligned.master is not None:
            chunks[aligned.master.id] = state.update_tier
        for slot in aligned.slots:
            chunk = source[slot.index]
            uses = [
                Use(new, Access.UPDATE if new in begun else Access.OVERWRITE, tier)
                for new, tier in chunks.items()
            ]
            begun.update(chunks)
            left[chunk] -= 1
            dead = () if left[chunk] else (chunk,)
            moments.append(Moment((*uses, Use(chunk, Access.READ)), {0: base}, dead))
    moments.append(Moment((), {0: base}, tuple(begun)))
    return Trace(moments), sizes
