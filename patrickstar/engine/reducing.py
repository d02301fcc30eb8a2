"""Gradients of all ranks become their mean, in shards.

A chunk of gradients is this rank's own while autograd fills it. As soon as its last gradient is
there, it is reduced: every rank gets the mean of its part, which it adds to what earlier backwards
of the same step left there. Reductions run beside the backward, one after the other: layers come in
bursts, so a few may wait for their turn where there is room for their chunks (see `sharding`).

Chunks are reduced in one order, from the end of the model to its beginning, and all of them in
every backward, whatever path a rank took: for a gradient that a rank has not, it contributes zeros.
So ranks that branch differently, or leave parameters out, cannot wait for each other in vain. When
the backward is over they tell each other what they had gradients for; a parameter that no rank had
one for is not updated.
"""

from __future__ import annotations

import torch

from patrickstar.comm import Work
from patrickstar.engine.aligned import AlignedChunks, Slot
from patrickstar.engine.alone import refuse_late_marks
from patrickstar.engine.construct import view_of
from patrickstar.engine.in_flight import InFlight
from patrickstar.engine.sharding import Sharding
from patrickstar.engine.state import ModelState
from patrickstar.engine.stepping import ShardNorms
from patrickstar.memory import Access, Use


class GradientReducer:
    """Reduces the gradient chunks of `state`.

    Attributes:
        enabled: without it gradients stay where they are, and the next backward adds to them.
    """

    def __init__(self, state: ModelState, sharding: Sharding, norms: ShardNorms) -> None:
        self._manager, self._ranks = state.manager, sharding.ranks
        self._sharding, self._norms = sharding, norms
        shared = [aligned for aligned in state.aligned if not aligned.alone]
        trained = [aligned for aligned in shared if aligned.gradient is not None]
        self._order = sorted(trained, key=lambda a: a.slots[0].index, reverse=True)
        self._turn: int | None = None  # of the order, in a backward
        self._come: set[int] = set()  # the parameters whose gradient has come in this backward
        self._in_flight = InFlight(self._manager, overlap=self._ranks.overlap)
        self.enabled = True

    def begin(self) -> None:
        """A backward begins."""
        self._turn = 0 if self.enabled else None
        self._come.clear()

    def open(self, aligned: AlignedChunks) -> None:
        """A gradient of this rank comes: if it is the first, make the chunk this rank's own."""
        assert aligned.gradient is not None
        if not any(slot.is_local for slot in aligned.slots):
            if self._in_flight.has(aligned):
                self._in_flight.finish()
            self._sharding.take(aligned.gradient)

    def collected(self, slot: Slot) -> None:
        """A gradient has come; reduce what is complete and has its turn.

        What earlier backwards left on this rank does not make a chunk complete: this one adds to
        it, and the chunk would travel twice.
        """
        self._come.add(slot.index)
        while self._turn is not None and self._turn < len(self._order):
            aligned = self._order[self._turn]
            if not all(slot.index in self._come for slot in aligned.slots):
                return
            self._turn += 1
            self._reduce(aligned)

    def end(self) -> None:
        """The backward is over: reduce the rest, and find out who has gradients."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        for aligned in self._order[turn:]:
            self._reduce(aligned)
        self.complete()

    def complete(self) -> None:
        """Reduce what any rank still has of its own. Called on all ranks."""
        self._in_flight.finish()
        slots = [slot for aligned in self._order for slot in aligned.slots]
        refuse_late_marks((slot.name, slot.parameter) for slot in slots)
        flags = [slot.is_local for slot in slots] + [slot.has_grad for slot in slots]
        anywhere = self._ranks.anywhere(flags)
        late = {slot.index for slot, is_late in zip(slots, anywhere, strict=False) if is_late}
        for slot, has_grad in zip(slots, anywhere[len(slots) :], strict=True):
            slot.has_grad = has_grad
        for aligned in self._order:
            if late.intersection(slot.index for slot in aligned.slots):
                self._reduce(aligned)
        self._in_flight.finish()

    def abandon(self) -> None:
        """The backward ended early."""
        self._turn = None
        self._in_flight.abandon()

    def forget(self) -> None:
        """The gradients are given up."""
        self._norms.clear()

    def remeasure(self, aligned: AlignedChunks) -> None:
        """The mean was changed by hand."""
        assert aligned.gradient is not None
        aligned.is_reduced = True
        own = self._sharding.own(aligned.gradient)
        with self._manager.use([Use(own.id, Access.READ)]), torch.no_grad():
            self._norms.measure(aligned, self._manager.tensor(own))

    def _reduce(self, aligned: AlignedChunks) -> None:
        gradient = aligned.gradient
        assert gradient is not None
        self.open(aligned)
        halves = self._sharding.of(gradient)
        first = not aligned.is_reduced
        uses = [
            Use(gradient.id, Access.UPDATE),
            Use(halves.own.id, Access.OVERWRITE if first else Access.UPDATE),
        ]

        def begin() -> Work:
            full, own = self._manager.tensor(gradient), self._manager.tensor(halves.own)
            with torch.no_grad():
                for slot in aligned.slots:
                    if not slot.is_local:
                        view_of(full, slot.offset, slot.shape, slot.stride).zero_()
            return self._ranks.average(halves.name, full, own if first else None, low=aligned.low)

        def then() -> None:
            own = self._manager.tensor(halves.own)
            with torch.no_grad():
                if not first:
                    own.add_(self._manager.tensor(gradient)[halves.start : halves.stop])
                self._norms.measure(aligned, own)

        def leave() -> None:
            self._sharding.leave(gradient)

        most = self._sharding.reductions_at_once(gradient.nbytes + halves.own.nbytes)
        self._in_flight.start(aligned, uses, begin, then, leave, most=most)
        aligned.is_reduced = True
        for slot in aligned.slots:
            slot.is_local = False
