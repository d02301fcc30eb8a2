"""Gradients go from autograd into chunks the moment they are complete.

Autograd runs a parameter's accumulation once per backward, after every contribution has been added
(a layer called several times, a tied weight); the hook here then moves the result into the gradient
chunk: a copy for the first backward of an accumulation, an addition for later ones, which are the
bits that accumulation into `p.grad` gives. The user still sees `p.grad`: the managed parameter
serves it from the chunk.

With several ranks the chunk has what this rank's backward made until that is reduced (see
`reducing`), and the mean over ranks afterwards, gathered for who looks at `p.grad`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from patrickstar.engine.aligned import AlignedChunks, Slot
from patrickstar.engine.construct import view_of
from patrickstar.engine.early import EarlyUpdates
from patrickstar.engine.parameter import as_view
from patrickstar.engine.reducing import GradientReducer
from patrickstar.engine.state import ModelState
from patrickstar.errors import ChunkStateError
from patrickstar.memory import Access, Use

_PLAIN = torch._C.DisableTorchFunctionSubclass


class Gradients:
    """The gradient chunks of a model and the hooks that fill them.

    Args:
        collected: called with the parameter's slot and its accumulated gradient (a view of the
            chunk) whenever a backward has added to it; with several ranks, for what this one has
            for itself.
        over: called when a backward has ended, well or not.
        reducer: makes the mean over ranks of them, if there are several.
        early: is told when a gradient has gone to its chunk and autograd has no more of it, and may
            use it up.

    Attributes:
        stores: how many gradients have begun to go into chunks.
        incomplete: a backward ended early and some of its gradients had been stored.
    """

    def __init__(
        self,
        state: ModelState,
        collected: Callable[[Slot, torch.Tensor], None] | None = None,
        reducer: GradientReducer | None = None,
        over: Callable[[], None] | None = None,
        early: EarlyUpdates | None = None,
    ) -> None:
        self._state, self._manager = state, state.manager
        self._collected, self.reducer = collected, reducer
        self._over, self._early = over, early
        self._handles: list[Any] = []
        self._rewritten: set[int] = set()
        self.stores = 0
        self.incomplete = False
        collect = _collecting(weakref.ref(self))
        for aligned, slot in state.slots.values():
            if aligned.gradient is not None:
                with _PLAIN():
                    handle = slot.parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
                    _put_first(slot.parameter._post_accumulate_grad_hooks, handle.id)
                self._handles.append(handle)
        state.home.get_gradient = self.get
        state.home.set_gradient = self.set

    def _collect(self, parameter: nn.Parameter) -> None:
        with _PLAIN(), torch.no_grad():
            gradient = parameter.grad
            if gradient is None:
                return
            aligned, slot = self._state.of(parameter)
            if self.reducer is None or aligned.alone:
                if self.reducer is not None:
                    gradient = self._share_of(aligned, gradient)
                self._store(aligned, slot, gradient, add=slot.has_grad)
            else:
                self.reducer.open(aligned)
                self._store(aligned, slot, gradient, add=slot.is_local)
                slot.is_local = True
            parameter.grad = None
            del gradient
            if self.reducer is not None and not aligned.alone:
                self.reducer.collected(slot)
            if self._early is not None:
                self._early.came(aligned, slot)

    def _share_of(self, aligned: AlignedChunks, gradient: torch.Tensor) -> torch.Tensor:
        """Of the mean over ranks, what comes from the losses whose sum `gradient` belongs to."""
        assert self._state.ranks is not None and aligned.gradient is not None
        return gradient.to(aligned.gradient.dtype).div_(self._state.ranks.divisor)

    def _store(
        self, aligned: AlignedChunks, slot: Slot, gradient: torch.Tensor, *, add: bool
    ) -> None:
        chunk = aligned.gradient
        assert chunk is not None
        self.stores += 1
        if self._manager.is_due(chunk):  # an update that still reads the old ones
            self._manager.do_due((chunk.id,))
        blank = self._manager.ledger.is_blank(chunk.id)
        with self._manager.use([Use(chunk.id, Access.OVERWRITE if blank else Access.UPDATE)]):
            flat = self._manager.tensor(chunk)
            if blank:
                _zero_gaps(flat, aligned.slots)
            view = view_of(flat, slot.offset, slot.shape, slot.stride)
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            if add:
                view.add_(gradient)
            else:
                view.copy_(gradient)
            slot.has_grad = True
            if self._collected is not None and aligned.sharding is None:
                self._collected(slot, view)

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """`parameter.grad` as the user sees it: a view of the chunk, or None.

        Raises:
            ChunkStateError: one part of it is in the shards and another is this rank's own; or the
                backward has used it up.
        """
        aligned, slot = self._state.of(parameter)
        self._refuse_used_up(slot)
        if not slot.has_grad or aligned.gradient is None:
            return None
        if aligned.is_reduced and any(other.is_local for other in aligned.slots):
            raise ChunkStateError(
                f"the gradient of {slot.name!r} cannot be looked at now: what earlier backwards "
                "gave is the mean over ranks, and the last backward, under no_sync, left its part "
                "on its rank. Look after a backward outside of no_sync"
            )
        self._manager.access((Use(aligned.gradient.id, Access.READ),))
        flat = self._manager.tensor(aligned.gradient)
        return as_view(view_of(flat, slot.offset, slot.shape, slot.stride), self._state.home)

    def set(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """`parameter.grad = gradient`; None takes it away."""
        aligned, slot = self._state.of(parameter)
        self._refuse_used_up(slot)
        if gradient is not None:
            with _PLAIN(), torch.no_grad():
                self._store(aligned, slot, gradient.detach(), add=False)
            return
        slot.has_grad = False
        if aligned.gradient is not None and not any(s.has_grad for s in aligned.slots):
            self.clear_chunk(aligned)

    def _refuse_used_up(self, slot: Slot) -> None:
        if self._early is not None:
            self._early.refuse_used_up(slot)

    def note_write(self, chunk: int) -> None:
        """The user changed a chunk through a view; if it holds gradients, so did their norms."""
        self._rewritten.add(chunk)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A backward runs; with several ranks its gradients have their mean when it is over."""
        stores = self.stores
        try:
            if self.reducer is not None:
                self.reducer.begin()
            yield
            if self.reducer is not None:
                with _PLAIN():
                    self.reducer.end()
        except BaseException:
            self.cut_short(stores)
            raise
        finally:
            self.is_over()

    def is_over(self) -> None:
        """A backward has ended."""
        if self._over is not None:
            self._over()

    def complete(self) -> None:
        """No gradient comes before the step; what the user did to them is taken into account."""
        if self.reducer is None:
            self._collect_rewritten()
            return
        sharding = self._state.sharding
        assert sharding is not None
        with _PLAIN():
            self.reducer.complete()
            changed = sharding.settle()
            for aligned in self._state.aligned:
                if aligned.gradient is not None and aligned.gradient.id in changed:
                    self.reducer.remeasure(aligned)
        self._collect_rewritten()

    def _collect_rewritten(self) -> None:
        rewritten, self._rewritten = self._rewritten, set()
        if self._collected is None or not rewritten:
            return
        for aligned in self._state.aligned:
            chunk = aligned.gradient
            if chunk is None or chunk.id not in rewritten or aligned.sharding is not None:
                continue
            if not any(slot.has_grad for slot in aligned.slots):
                continue
            with _PLAIN(), torch.no_grad(), self._manager.use([Use(chunk.id, Access.READ)]):
                flat = self._manager.tensor(chunk)
                for slot in aligned.slots:
                    if slot.has_grad:
                        view = view_of(flat, slot.offset, slot.shape, slot.stride)
                        self._collected(slot, view)

    def clear_chunk(self, aligned: AlignedChunks) -> None:
        """Forget the gradients of one chunk; an update that is due keeps their values."""
        for slot in aligned.slots:
            slot.has_grad = slot.is_local = False
        aligned.is_reduced = False
        if aligned.gradient is None:
            return
        if aligned.sharding is not None:
            aligned.sharding.clear(aligned.gradient)
        elif not self._manager.is_due(aligned.gradient):
            self._manager.release(aligned.gradient)

    def cut_short(self, stores: int) -> None:
        """A backward ended early that began when there were `stores`."""
        if self.reducer is not None:
            self.reducer.abandon()
        self.incomplete = self.incomplete or self.stores != stores
        with _PLAIN():  # what autograd had left for the hook is no part of the next backward
            for _, slot in self._state.slots.values():
                slot.parameter.grad = None

    def clear(self) -> None:
        self.incomplete = False
        if self.reducer is not None:
            self.reducer.forget()
        for aligned in self._state.aligned:
            if aligned.gradient is not None:
                self.clear_chunk(aligned)
        for _, parameter in self._state.unmanaged:
            parameter.grad = None

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _collecting(gradients: weakref.ref[Gradients]) -> Callable[[nn.Parameter], None]:
    """The hook of every parameter.

    The garbage collector does not see what such hooks refer to: an engine that is just dropped
    would be held by its own parameters for good.
    """

    def collect(parameter: nn.Parameter) -> None:
        there = gradients()
        if there is not None:
            there._collect(parameter)

    return collect


def _put_first(hooks: MutableMapping[int, Any], key: int) -> None:
    """Let this hook run before those that the parameter had already.

    They look at `grad`, which is served from the chunk: it has to be there by then. Autograd goes
    by the order of insertion, which `OrderedDict.move_to_end` leaves as it is.
    """
    others = [(other, hook) for other, hook in hooks.items() if other != key]
    for other, _ in others:
        del hooks[other]
    hooks.update(others)


def _zero_gaps(flat: torch.Tensor, slots: list[Slot]) -> None:
    """Alignment between tensors takes part in the update; it must not be what memory held."""
    ends = [slot.offset + slot.numel for slot in slots]
    starts = [slot.offset for slot in slots[1:]] + [flat.numel()]
    for end, start in zip(ends, starts, strict=True):
        if start > end:
            flat[end:start].zero_()
