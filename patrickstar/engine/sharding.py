"""Chunks of which every rank keeps one N-th.

A chunk that is sharded is two: the *full* one, which everybody asks for as on one rank, and this
rank's *shard*, where the contents are. The full one is blank until it is used. Then it is gathered
from all ranks, whoever asks: an operator, autograd, `state_dict`, a checkpoint. So a chunk that is
sharded can be asked for by all ranks together only. It stays until others have been gathered; what
was changed in it meanwhile goes to the shards: all ranks make the same changes, and each keeps its
part.

When a gathered chunk is given up does not depend on memory, which may differ between ranks, but on
the order of uses alone, which does not: the collectives of all ranks stay in step. Chunks that are
gathered and waiting can be moved to lower tiers like any other.

In a first iteration the one that was used longest ago is given up when there are two others. From
the second of its kind on the order is known (`foresight`): what is used furthest in the future is
given up, and what is used next is gathered while the computation goes on. That takes room for one
more chunk, which the first iteration sets aside (`spare`), so a budget that is too small shows
there. Where the first iteration left room on every rank, more chunks stay: as many as it takes to
gather each of them once in a forward and once in a backward, and two may be on their way.

A gradient is asked for in full after the backward, too. Before, its full chunk is this rank's own
and is `taken`: see `engine.reducing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable

import torch

from patrickstar.comm import Work
from patrickstar.engine.foresight import Foresight
from patrickstar.engine.gather_room import room_left
from patrickstar.engine.halves import Halves
from patrickstar.engine.in_flight import InFlight
from patrickstar.engine.ranks import Ranks
from patrickstar.memory import Access, Chunk, ChunkManager, Due, Use
from patrickstar.memory.trace import Trace

MORE_REDUCTIONS = 2
"""How many gradient chunks wait behind the one that travels, at most."""

MOST_GATHERED = 2
"""How many chunks stay gathered while the order of uses is not known; neighbours take turns."""


class Sharding:
    """The sharded chunks of one run.

    Args:
        manager: has the chunks.
        ranks: those that share them.
    """

    def __init__(self, manager: ChunkManager, ranks: Ranks) -> None:
        self._manager, self.ranks = manager, ranks
        self._halves: dict[int, Halves] = {}
        self._gathered: dict[int, int] = {}  # versions at that time; least recently used first
        self._changed: set[int] = set()  # full chunks that were changed before they were given up
        self._parameters: dict[int, int] = {}  # bytes of the chunks whose order is foreseen
        self._foresight = Foresight(self._parameters)
        self._flying: dict[int, InFlight] = {}  # gathered ahead and not arrived yet, oldest first
        self._alone: set[int] = set()  # chunks that this rank has for itself
        self._whole: dict[int, int] = {}  # bytes of chunks that this rank has whole
        self._left: int | None = None  # what this rank has room for beside the first iteration
        self._extra: int | None = None  # what all ranks have room for beside the first iteration

    def shard(self, full: Chunk, name: str, *, from_first: bool = False) -> None:
        """Keep `full` in shards from now on; what it holds is `spread`, or it starts with zeros.

        Args:
            name: for messages, the same on every rank.
            from_first: when it is spread, what the first rank has counts, for all ranks.
        """
        start, stop = self.ranks.own(full.numel)
        own = self._manager.create(stop - start, full.dtype, full.kind)
        self._halves[full.id] = Halves(name, full, own, start, stop, from_first)
        if full.kind == "parameter":  # others change in the course of an iteration
            self._parameters[full.id] = full.nbytes

    def keep_alone(self, chunk: Chunk) -> None:
        """No other rank has this chunk, or a part of it."""
        self._alone.add(chunk.id)
        self.keep_whole(chunk)

    def keep_whole(self, chunk: Chunk) -> None:
        """This rank keeps all of this chunk."""
        self._whole[chunk.id] = chunk.nbytes

    def is_alone(self, chunk: Chunk) -> bool:
        return chunk.id in self._alone

    def forget(self, full: Chunk) -> None:
        """`full` is about to be deleted, and its contents with it."""
        if full.id in self._alone:
            self._alone.remove(full.id)
            del self._whole[full.id]
            return
        self.take(full)
        self._manager.delete(self._halves.pop(full.id).own)
        self._parameters.pop(full.id, None)

    def own(self, chunk: Chunk) -> Chunk:
        """Where this rank keeps its part: the shard, or the chunk itself if it is not sharded."""
        halves = self._halves.get(chunk.id)
        return chunk if halves is None else halves.own

    def is_sharded(self, chunk: Chunk) -> bool:
        return chunk.id in self._halves

    def of(self, chunk: Chunk) -> Halves:
        return self._halves[chunk.id]

    @property
    def spare(self) -> int:
        """Bytes that gathering ahead takes on the compute tier."""
        if not self._comes_ahead:
            return 0
        halves = [self._halves[chunk] for chunk in self._parameters]
        return max((half.full.nbytes + 2 * half.own.nbytes for half in halves), default=0)

    def reductions_at_once(self, nbytes: int) -> int:
        """How many gradient chunks may be on their way, or wait for it, at a time.

        Ranks need not agree: chunks travel in the same order, however many are waited for.

        Args:
            nbytes: that each holds.
        """
        left = (self._left or 0) // 2  # gathers have the other half
        return 1 + min(left // nbytes, MORE_REDUCTIONS)

    def begin(self, key: Hashable, kind: str) -> tuple[Hashable, bool]:
        """An iteration begins. Returns the key of its plan, and whether it is foreseen.

        Args:
            key: what its use of memory depends on.
            kind: what its order of uses depends on.
        """
        foreseen = self._foresight.begin(kind) and self.ranks.shards_parameters
        return (("foreseen", key), True) if foreseen else (key, False)

    def begin_pass(self) -> None:
        """A forward or a backward begins."""
        self._foresight.begin_pass()

    def end(self, *, complete: bool, trace: Trace | None = None) -> None:
        """The iteration is over, or was abandoned.

        Args:
            trace: what it took, if it was the first of its kind and ended with a step.
        """
        if complete and trace is not None and self._left is None:
            halves = self._halves.values()
            sizes = {chunk.id: chunk.nbytes for half in halves for chunk in (half.full, half.own)}
            kept = sum(half.own.nbytes for half in halves) + sum(self._whole.values())
            tiers = self._manager.ledger.tiers
            self._left = room_left(tiers, sizes | self._whole, kept, trace)
        if not self.ranks.shards_parameters:
            return
        if self._left is not None and self._extra is None:
            self._extra = self.ranks.least(self._left)
        largest = max(self._parameters.values(), default=0) if self._comes_ahead else 0
        self._foresight.end(complete=complete, ahead=largest, extra=self._extra or 0)

    # What is in the full chunk

    def spread(self, full: Chunk) -> None:
        """Keep this rank's part of what is in the full chunk, and give that up."""
        halves = self._halves[full.id]
        access = Access.UPDATE if halves.from_first else Access.READ
        uses = [Use(full.id, access), Use(halves.own.id, Access.OVERWRITE)]
        with self._manager.use(uses), torch.no_grad():
            whole = self._manager.tensor(full)
            if halves.from_first:
                self.ranks.from_first(halves.name, whole)
            self._manager.tensor(halves.own).copy_(whole[halves.start : halves.stop])
        self.leave(full)

    def leave(self, full: Chunk) -> None:
        """Give up what is in the full chunk: the contents are what the shards hold."""
        self.take(full)
        halves = self._halves[full.id]

        def gather() -> None:
            self._begin_gathering(halves).wait()
            self._is_there(halves)
            self._look_ahead()

        self._wait_for_use(halves, halves.to_gather, gather)

    def take(self, full: Chunk) -> None:
        """The full chunk is this rank's own, and blank, until it is spread or left."""
        self._land(full.id)
        self._manager.drop_due(full)
        self._gathered.pop(full.id, None)
        self._manager.release(full)

    def clear(self, full: Chunk) -> None:
        """The contents are zeros, on all ranks."""
        self.leave(full)
        self._changed.discard(full.id)
        self._manager.release(self._halves[full.id].own)

    def used(self, chunks: Iterable[int]) -> None:
        """These chunks are about to be used; those that were used last are given up last."""
        group = tuple(chunk for chunk in chunks if chunk in self._halves)
        for chunk in group:
            version = self._gathered.pop(chunk, None)
            if version is not None:
                self._gathered[chunk] = version
        group = tuple(chunk for chunk in group if chunk in self._parameters)
        if group and self._foresight.used(group):
            self._look_ahead()

    def settle(self) -> set[int]:
        """Give up everything that is gathered.

        Returns the full chunks that had been changed when they were given up, since the last call.
        """
        for chunk in list(self._flying):
            self._land(chunk)
        for chunk in list(self._gathered):
            self._give_up(chunk)
        changed, self._changed = self._changed, set()
        return changed

    # Inside

    @property
    def _comes_ahead(self) -> bool:
        return self.ranks.shards_parameters and self.ranks.overlap

    def _begin_gathering(self, halves: Halves) -> Work:
        full, own = self._manager.tensor(halves.full), self._manager.tensor(halves.own)
        with torch.no_grad():
            return self.ranks.gather(halves.name, full, own)

    def _wait_for_use(
        self, halves: Halves, uses: tuple[Use, ...], work: Callable[[], None]
    ) -> None:
        chunk = halves.full.id
        make_way = self._make_way(chunk)
        self._manager.before_next_use(Due((chunk,), uses, work, on_use=True, prepare=make_way))

    def _is_there(self, halves: Halves) -> None:
        self._gathered[halves.full.id] = self._manager.version(halves.full)
        self._foresight.held(self._there())

    def _there(self) -> list[int]:
        """The parameters that are gathered or on their way."""
        return [chunk for chunk in (*self._gathered, *self._flying) if chunk in self._parameters]

    def _free(self, wanted: Collection[int] = ()) -> list[int]:
        """What is gathered and may be given up, what was used longest ago first."""
        return [
            chunk
            for chunk in self._gathered
            if chunk not in wanted and not self._manager.is_pinned(self._halves[chunk].full)
        ]

    def _look_ahead(self) -> None:
        """What is used now is there: begin to gather what is used next, if there is room."""
        foresight = self._foresight
        if not (self._comes_ahead and foresight.foreseen):
            return
        if not all(chunk in self._gathered for chunk in foresight.group):
            return  # the rest of them comes first
        while len(self._flying) < foresight.room.depth:
            free = [chunk for chunk in self._free(foresight.group) if chunk in self._parameters]
            found = foresight.ahead(self._there(), free)
            if found is None:
                return
            following, victims = found
            for chunk in victims:
                self._give_up(chunk)
            self._launch(self._halves[following])

    def _launch(self, halves: Halves) -> None:
        """Gather a chunk while the computation goes on."""
        chunk, flight = halves.full.id, InFlight(self._manager, overlap=True)
        self._manager.drop_due(halves.full)
        try:
            flight.start(
                chunk,
                halves.to_gather,
                lambda: self._begin_gathering(halves),
                afterwards=lambda: self._is_there(halves),
            )
        except BaseException:
            self.leave(halves.full)
            raise
        self._flying[chunk] = flight

        def arrive() -> None:
            self._land(chunk)
            self._look_ahead()

        self._wait_for_use(halves, (), arrive)

    def _land(self, chunk: int) -> None:
        """Wait for a chunk that is on its way."""
        flight = self._flying.pop(chunk, None)
        if flight is not None:
            flight.finish()

    def _make_way(self, coming: int) -> Callable[[frozenset[int]], None]:
        """Gives up what is in the way of `coming`, but for what is wanted together with it."""

        def make_way(wanted: frozenset[int]) -> None:
            free = self._free({*wanted, coming})
            if coming in self._parameters and self._foresight.foreseen:
                free = [chunk for chunk in free if chunk in self._parameters]
                victims = self._foresight.victims(coming, self._there(), free)
            else:
                others = sum(chunk != coming for chunk in self._gathered)
                victims = free[: max(others + 1 - MOST_GATHERED, 0)]
            for chunk in victims:
                self._give_up(chunk)

        return make_way

    def _give_up(self, chunk: int) -> None:
        full = self._halves[chunk].full
        if self._manager.version(full) == self._gathered[chunk]:
            self.leave(full)
        else:
            self.spread(full)
            self._changed.add(chunk)
