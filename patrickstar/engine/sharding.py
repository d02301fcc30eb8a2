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

From the second iteration of its kind on, the chunk that will be asked for next is gathered while
the computation goes on with the one that is there (`gather_order`). That takes room for one more
chunk; the first iteration sets it aside (`spare`), so a budget that is too small shows there.

A gradient is asked for in full after the backward, too. Before, its full chunk is this rank's own
and is `taken`: see `engine.reducing`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch

from patrickstar.comm import Work
from patrickstar.engine.gather_order import GatherOrder
from patrickstar.engine.in_flight import InFlight
from patrickstar.engine.ranks import Ranks
from patrickstar.memory import Access, Chunk, ChunkManager, Due, Use

MOST_GATHERED = 2
"""How many chunks that nobody uses now stay gathered; two neighbours often take turns."""


@dataclass(frozen=True)
class Halves:
    """A sharded chunk."""

    name: str
    full: Chunk
    own: Chunk
    start: int
    stop: int
    from_first: bool

    @property
    def to_gather(self) -> tuple[Use, Use]:
        """What filling the full chunk from the shards takes."""
        return Use(self.full.id, Access.OVERWRITE), Use(self.own.id, Access.READ)


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
        self._order = GatherOrder()
        self._ahead = InFlight(manager, overlap=True)

    def shard(self, full: Chunk, name: str, *, from_first: bool = False) -> None:
        """Keep `full` in shards from now on; what it holds is `spread`, or it starts with zeros.

        Args:
            name: for messages, the same on every rank.
            from_first: when it is spread, what the first rank has counts, for all ranks.
        """
        start, stop = self.ranks.own(full.numel)
        own = self._manager.create(stop - start, full.dtype, full.kind)
        self._halves[full.id] = Halves(name, full, own, start, stop, from_first)

    def forget(self, full: Chunk) -> None:
        """`full` is about to be deleted, and its contents with it."""
        self.take(full)
        self._manager.delete(self._halves.pop(full.id).own)

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
        if not self._foresees:
            return 0
        sizes = [
            half.full.nbytes + 2 * half.own.nbytes
            for half in self._halves.values()
            if half.full.kind == "parameter"
        ]
        return max(sizes, default=0)

    def begin(self, key: Hashable) -> tuple[Hashable, bool]:
        """An iteration begins. Returns the key of its plan, and whether chunks come ahead in it."""
        foreseen = self._foresees and self._order.begin(key)
        return (("gathered ahead", key), True) if foreseen else (key, False)

    def end(self, *, complete: bool) -> None:
        """The iteration is over, or was abandoned."""
        self._order.end(complete=complete)

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
            self._foresee(full.id)

        self._wait_for_use(halves, halves.to_gather, gather)

    def take(self, full: Chunk) -> None:
        """The full chunk is this rank's own, and blank, until it is spread or left."""
        if self._ahead.what == full.id:
            self._ahead.finish()
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
        for chunk in chunks:
            version = self._gathered.pop(chunk, None)
            if version is not None:
                self._gathered[chunk] = version

    def settle(self) -> set[int]:
        """Give up everything that is gathered.

        Returns the full chunks that had been changed when they were given up, since the last call.
        """
        self._ahead.finish()
        for chunk in list(self._gathered):
            self._give_up(chunk)
        changed, self._changed = self._changed, set()
        return changed

    # Inside

    @property
    def _foresees(self) -> bool:
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

    def _foresee(self, chunk: int) -> None:
        """`chunk` was asked for; begin to gather the one that will be next."""
        if self._halves[chunk].full.kind != "parameter":
            return  # others change in the course of an iteration
        following = self._order.after(chunk)
        if following is None or following in self._gathered:
            return
        halves = self._halves[following]
        self._manager.drop_due(halves.full)

        def begin() -> Work:
            return self._begin_gathering(halves)

        def arrive() -> None:
            if self._ahead.what == following:
                self._ahead.finish()
            self._foresee(following)

        def there() -> None:
            self._is_there(halves)

        self._ahead.start(following, halves.to_gather, begin, afterwards=there)
        self._wait_for_use(halves, (), arrive)

    def _make_way(self, coming: int) -> Callable[[frozenset[int]], None]:
        """Gives up what was used longest ago, but for what is wanted together with `coming`."""

        def make_way(wanted: frozenset[int]) -> None:
            others = [chunk for chunk in self._gathered if chunk != coming]
            spare = [
                chunk
                for chunk in others
                if chunk not in wanted and not self._manager.is_pinned(self._halves[chunk].full)
            ]
            for chunk in spare[: max(len(others) + 1 - MOST_GATHERED, 0)]:
                self._give_up(chunk)

        return make_way

    def _give_up(self, chunk: int) -> None:
        full = self._halves[chunk].full
        if self._manager.version(full) == self._gathered[chunk]:
            self.leave(full)
        else:
            self.spread(full)
            self._changed.add(chunk)
