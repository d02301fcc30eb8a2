"""Chunks with one layout: index i is the same weight in each of them.

With several ranks, what the stage of ZeRO shards is kept in shards (see `sharding`), and a rank
updates its part of the weights.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from patrickstar.engine.sharding import Sharding
from patrickstar.engine.split import Spread
from patrickstar.memory import Access, Chunk, ChunkManager, Use
from patrickstar.optim import Layout as RunLayout
from patrickstar.optim.layout import Segment


@dataclass(eq=False)
class Slot:
    """One parameter's place in its chunks, and what the optimizer knows of it.

    `step` counts the updates it took part in; a step without a gradient does not count, as in
    `torch.optim`. With several ranks, `is_local` says that the gradient chunk has one of this rank
    that is not part of the mean yet.
    """

    name: str
    parameter: nn.Parameter
    index: int
    offset: int
    numel: int
    shape: torch.Size
    stride: tuple[int, ...]
    step: int = 0
    has_grad: bool = False
    is_local: bool = False


@dataclass(eq=False)
class AlignedChunks:
    """Chunks with one layout: the same weights as parameters, gradients, masters and states.

    With several ranks, this rank updates the weights from `start` to `stop`. What it keeps of a
    chunk that is sharded has these elements only, and is another chunk: see `sharding`.
    """

    group: int
    slots: list[Slot]
    parameter: Chunk
    gradient: Chunk | None = None
    master: Chunk | None = None
    states: dict[str, Chunk] = field(default_factory=dict)
    # The parameters were changed from Python since the last update; the masters have not followed.
    changed: bool = False
    started: bool = False
    start: int = 0
    stop: int = 0
    is_reduced: bool = False  # the mean of the ranks' gradients so far is in the shards
    sharding: Sharding | None = None
    low: bool = False  # the ranks' gradients travel in the precision of autocast
    spread: Spread = field(default_factory=Spread)  # of parameters that are parts of larger ones
    alone: bool = False  # of several ranks, this one has these parameters for itself
    _layout: RunLayout | None = None
    _own_layout: RunLayout | None = None

    @property
    def name(self) -> str:
        """The parameters in it, for messages and collectives."""
        first, last = self.slots[0].name, self.slots[-1].name
        return first if first == last else f"{first} to {last}"

    def chunks(self) -> Iterator[Chunk]:
        for chunk in (self.parameter, self.gradient, self.master, *self.states.values()):
            if chunk is not None:
                yield chunk

    def layout(self) -> RunLayout:
        """Where the tensors lie, for the update rules; built once, after the last slot came."""
        if self._layout is None:
            self._layout = RunLayout(
                tuple(Segment(s.offset, tuple(s.shape), key=s.index) for s in self.slots)
            )
        return self._layout

    def own_layout(self) -> RunLayout:
        """The same for the weights that this rank updates."""
        if self._own_layout is None:
            whole = self.start == 0 and self.stop == self.parameter.numel
            self._own_layout = self.layout() if whole else self.layout().cut(self.start, self.stop)
        return self._own_layout

    def kept(self) -> Iterator[Chunk]:
        """The chunks that hold the state on this rank."""
        for chunk in self.chunks():
            yield chunk if self.sharding is None else self.sharding.own(chunk)

    def updated(self) -> Iterator[tuple[Chunk, Chunk]]:
        """Every chunk, with the one that an update on this rank works on.

        Where this rank updates everything, that is the full one, gathered if need be.
        """
        everything = self.stop - self.start == self.parameter.numel
        for chunk in self.chunks():
            own = chunk if self.sharding is None or everything else self.sharding.own(chunk)
            yield chunk, own

    def slot_at(self, offset: int) -> Slot | None:
        """The parameter that covers element `offset`."""
        place = bisect_right(self.slots, offset, key=lambda slot: slot.offset) - 1
        return self.slots[place] if place >= 0 else None


def shard_chunks(aligned: AlignedChunks, sharding: Sharding) -> None:
    """Keep what the stage shards of these chunks in shards; they are blank."""
    aligned.sharding, ranks = sharding, sharding.ranks
    sharded: list[Chunk] = [] if aligned.gradient is None else [aligned.gradient]
    if ranks.shards_states:
        if aligned.gradient is not None:
            aligned.start, aligned.stop = ranks.own(aligned.parameter.numel)
        sharded += [*filter(None, [aligned.master]), *aligned.states.values()]
    if ranks.shards_parameters:
        sharded.append(aligned.parameter)
    for chunk in aligned.chunks():
        if chunk not in sharded:
            sharding.keep_whole(chunk)
    for chunk in sharded:
        sharding.shard(chunk, f"{chunk.kind} {aligned.name}")
        if chunk.kind not in ("parameter", "master"):
            sharding.leave(chunk)


def settle_in(
    aligned: AlignedChunks, sharding: Sharding, manager: ChunkManager, *, alike: bool
) -> None:
    """The weights are there: take the first rank's, and keep of them what the stage keeps.

    Args:
        alike: all ranks have the same already.
    """
    for chunk in filter(None, [aligned.parameter, aligned.master]):
        if not alike:
            with manager.use([Use(chunk.id, Access.UPDATE)]), torch.no_grad():
                sharding.ranks.from_first(f"{chunk.kind} {aligned.name}", manager.tensor(chunk))
        if sharding.is_sharded(chunk):
            sharding.spread(chunk)
