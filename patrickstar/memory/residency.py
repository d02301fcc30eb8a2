"""Where chunks are: the books, the bytes and the transfers between them, changed together.

Every step here is a legal transition of the ledger with what it means for the tiers: a place is
taken or given back, a copy begins on a thread or ends. What should be where is decided elsewhere
(see `mover`). All bookkeeping happens on the caller's thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from patrickstar.errors import ChunkStateError
from patrickstar.memory.chunk import Chunk
from patrickstar.memory.copying import prepare_copy
from patrickstar.memory.heap import ProcessHeap, give_back_free_pages, keep_free_pages
from patrickstar.memory.ledger import CopyState, Ledger
from patrickstar.memory.observer import Observer, Why
from patrickstar.memory.pinned import PinnedTier
from patrickstar.memory.tensors import ChunkTensors
from patrickstar.memory.tiers import CpuTier, Tier
from patrickstar.memory.trace import Use
from patrickstar.memory.transfer import Completion, Transfer, TransferThreads


class Residency:
    """Chunks and their copies on `tiers`, the fastest first.

    Args:
        threads: how many copies run at once.
        observer: is told what changes, if there is one.

    Attributes:
        chunks: all there are, by id.
        in_flight: transfers that are under way.
        moved: bytes copied so far, by source and target tier.
    """

    def __init__(
        self, tiers: Sequence[Tier], threads: int, observer: Observer | None = None
    ) -> None:
        self.tiers = list(tiers)
        self.observer = observer
        self.ledger = Ledger([(tier.name, tier.capacity) for tier in tiers])
        self.tensors = ChunkTensors(self.tiers)
        self.chunks: dict[int, Chunk] = {}
        self.in_flight = 0
        self.moved: dict[tuple[int, int], int] = {}
        self._threads = TransferThreads(threads if len(self.tiers) > 1 else 0)
        budgets = [tier.capacity for tier in tiers if isinstance(tier, CpuTier | PinnedTier)]
        self._cpu_budget = sum(budget or 0 for budget in budgets)
        keep_free_pages(os.environ)
        self._heap = None if None in budgets else ProcessHeap()
        self._process, self._closed = os.getpid(), False

    # Questions

    def nbytes(self, chunk: int) -> int:
        return self.chunks[chunk].nbytes

    def fits(self, tier: int, nbytes: int) -> bool:
        return nbytes <= self.ledger.tiers[tier].room

    def is_in_use(self, chunk: int, tier: int) -> bool:
        """Whether somebody uses the copy on `tier`, or may still read it there."""
        if self.ledger.entry(chunk).pins[tier]:
            return True
        return tier == 0 and self.tensors.is_referenced(chunk)

    def can_leave(self, chunk: int, tier: int) -> bool:
        return not self.ledger.entry(chunk).locks[tier] and not self.is_in_use(chunk, tier)

    def is_saved(self, chunk: int, tier: int) -> bool:
        """Whether a slower tier has the contents too; a plan counts on that, not on faster ones."""
        copies = self.ledger.entry(chunk).copies
        return tier + 1 == len(copies) or CopyState.VALID in copies[tier + 1 :]

    def is_moving(self, chunk: int) -> bool:
        return CopyState.LOADING in self.ledger.entry(chunk).copies

    def refuse_when_over(self) -> None:
        """Raise where chunks cannot be used any more."""
        if self._closed:
            raise ChunkStateError("this ChunkManager is closed; its chunks cannot be used any more")
        if os.getpid() != self._process:
            raise ChunkStateError(
                "chunks belong to the process that made them, and this one was forked from it: it "
                "has neither their memory nor the threads that move them. Copy what a worker needs "
                "before the fork, or start workers with 'spawn'"
            )

    # Steps

    def create(self, places: Sequence[tuple[int, int]], *, zero: bool) -> None:
        """Give chunks new contents on tiers with room for them, all or none.

        Args:
            places: pairs of chunk and tier.
        """
        taken: list[tuple[int, int]] = []
        try:
            for chunk, tier in places:
                self.tiers[tier].take(chunk, self.nbytes(chunk), zero=zero)
                taken.append((chunk, tier))
        except BaseException:
            for chunk, tier in taken:
                self.tiers[tier].give_back(chunk)
            raise
        for chunk, tier in places:
            self.blank(chunk)
            self.ledger.create(chunk, tier)
            self._note_placed(chunk, tier)
            self.settle_tier(tier)

    def wrote(self, chunk: int, tier: int) -> None:
        """The copy on `tier` has new contents, so no other has."""
        self._give_back(chunk, self.ledger.wrote(chunk, tier), Why.WRITTEN)

    def blank(self, chunk: int) -> None:
        """The contents of the chunk are dead."""
        self._give_back(chunk, self.ledger.blank(chunk), Why.RELEASED)

    def drop(self, chunk: int, tier: int, why: Why) -> None:
        """Give up a copy that another makes superfluous."""
        self.ledger.drop(chunk, tier)
        self._give_back(chunk, [tier], why)

    def start(self, chunk: int, source: int, target: int) -> None:
        """Begin a copy; there is room for it."""
        nbytes = self.nbytes(chunk)
        self.refuse_when_over()
        from_, to = self.tiers[source], self.tiers[target]
        self.ledger.begin_load(chunk, source, target)
        try:
            to.take(chunk, nbytes, zero=False)
        except BaseException:
            self.ledger.fail_load(chunk, source, target)
            raise
        self._note_placed(chunk, target)
        self.settle_tier(target)
        work = prepare_copy(chunk, nbytes, from_, to)
        self._threads.start(Transfer(chunk, source, target), work)
        self.in_flight += 1

    def finish_one(self, *, wait: bool) -> bool:
        """Enter a copy that has ended; whether there was one. Raises what stopped it."""
        if not self.in_flight:
            if wait:
                raise ChunkStateError("a transfer is waited for that was never started")
            return False
        completion = self._wait() if wait else self._threads.poll()
        if completion is None:
            return False
        self._finish(completion)
        return True

    def _wait(self) -> Completion:
        if self.observer is None:
            return self._threads.wait()
        began = time.perf_counter()
        completion = self._threads.wait()
        self.observer.waited(began, time.perf_counter())
        return completion

    def _finish(self, completion: Completion) -> None:
        self.in_flight -= 1
        made = completion.transfer
        chunk, source, target = made.chunk, made.source, made.target
        if completion.error is not None:
            self.ledger.fail_load(chunk, source, target)
            self._give_back(chunk, [target], Why.FAILED)
            raise completion.error
        self.ledger.finish_load(chunk, source, target)
        self.moved[source, target] = self.moved.get((source, target), 0) + self.nbytes(chunk)
        if self.observer is not None:
            began, ended = completion.began, completion.ended
            self.observer.moved(self.chunks[chunk], source, target, began, ended)

    def set_other(self, tier: int, nbytes: int) -> None:
        """So much of `tier` is in use by what no chunk owns."""
        grown = nbytes - self.ledger.tiers[tier].other
        self.ledger.set_other(tier, nbytes)
        self.settle_tier(tier, max(grown, 0))
        if self.observer is not None:
            self.observer.other(tier, nbytes)

    def settle_tier(self, tier: int, coming: int = 0) -> None:
        """Keep what the tier and the heap hold beside chunks inside the budget.

        Args:
            coming: bytes that no chunk owns and that are about to be allocated.
        """
        account = self.ledger.tiers[tier]
        self.tiers[tier].settle(account.chunks, account.other)
        if self._heap is not None:
            self._heap.keep_within(self._cpu_budget, coming)

    def mend(self, uses: Sequence[Use]) -> None:
        """Make everything right from what is known to be true.

        Valid copies have their bytes, whenever a change ended early: they are made before they are
        entered, and struck out before their place is taken away. Copies under way are given up;
        their sources are still there.

        Args:
            uses: what is pinned.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._threads.give_up()
        self.in_flight = 0
        for chunk in list(self.chunks):
            if chunk not in self.ledger:
                self._forget(chunk)
        self.ledger.mend([(use.chunk, use.tier, use.access.writes) for use in uses])
        for number, tier in enumerate(self.tiers):
            tier.mend({chunk for chunk in self.chunks if self.ledger.is_valid(chunk, number)})
        if self.observer is not None:
            tiers = range(len(self.tiers))
            places = [(c, t) for c in self.chunks for t in tiers if self.ledger.is_valid(c, t)]
            self.observer.mended([(self.chunks[chunk], tier) for chunk, tier in places])

    def forget(self, chunk: int) -> None:
        """A blank chunk is gone for good."""
        self.ledger.remove(chunk)
        self._forget(chunk)

    def _forget(self, chunk: int) -> None:
        self.tensors.forget(chunk)
        for tier in self.tiers:
            tier.forget(chunk)
        del self.chunks[chunk]

    def close(self) -> None:
        self._closed = True
        self._threads.close()
        for tier in self.tiers:
            tier.close()
        if self._heap is not None:
            self._heap.close()
        give_back_free_pages()

    def _give_back(self, chunk: int, tiers: Sequence[int], why: Why) -> None:
        for tier in tiers:
            self.tiers[tier].give_back(chunk)
            if self.observer is not None:
                self.observer.left(self.chunks[chunk], tier, why)

    def _note_placed(self, chunk: int, tier: int) -> None:
        if self.observer is not None:
            self.observer.placed(self.chunks[chunk], tier)
