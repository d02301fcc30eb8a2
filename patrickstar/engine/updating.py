"""The update of one chunk's weights, decided at one time and made then or later.

`optimizer.step()` decides: which parameters take part, the number of the step, the factors for the
gradients and the hyperparameters as they are now. Making the update needs nothing but the chunks,
so it can be put off until the weights are used next (see `owed`) and has the same bits then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from patrickstar.engine.state import AlignedChunks, ModelState, Slot
from patrickstar.memory import Access, Use
from patrickstar.optim import GradScale, Run, Scratch
from patrickstar.optim import Layout as RunLayout


@dataclass(frozen=True)
class Range:
    """Contiguous weights of a chunk with gradients and one step count."""

    start: int
    stop: int
    step: int
    layout: RunLayout


@dataclass(frozen=True)
class ChunkUpdate:
    """What will happen to the weights of `aligned`.

    Attributes:
        slots: the parameters that take part.
        hyper: their parameter group, as it was when this was decided.
        scale: factors for the gradients.
    """

    aligned: AlignedChunks
    slots: tuple[Slot, ...]
    ranges: tuple[Range, ...]
    hyper: dict[str, Any]
    scale: GradScale

    @classmethod
    def decide(cls, aligned: AlignedChunks, group: dict[str, Any], scale: GradScale) -> ChunkUpdate:
        """The update that `aligned` gets now, by the gradients that are there."""
        hyper = {name: _kept(value) for name, value in group.items() if name != "params"}
        slots = tuple(slot for slot in aligned.slots if slot.has_grad)
        return cls(aligned, slots, tuple(_ranges(aligned)), hyper, scale)

    def uses(self, tier: int) -> tuple[Use, ...]:
        """The chunks it needs on `tier`, and how."""
        whole = len(self.slots) == len(self.aligned.slots)
        return update_uses(self.aligned, tier, remade=whole and not self.aligned.changed)

    def count(self) -> None:
        """The step counts, and autograd sees that the parameters have changed."""
        for slot in self.slots:
            slot.step += 1
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version([slot.parameter for slot in self.slots])

    def make(self, state: ModelState, scratch: Scratch) -> None:
        """Change the weights; the chunks of `uses` are in use."""
        aligned = self.aligned
        if aligned.changed:
            follow_parameters(state, aligned)
        start_states(state, aligned, self.hyper)
        runs = list(self._runs(state))
        state.rule.apply(runs, self.hyper, grad_scale=self.scale, scratch=scratch)

    def _runs(self, state: ModelState) -> Iterator[Run]:
        manager, tier, aligned = state.manager, state.update_tier, self.aligned
        assert aligned.gradient is not None
        for part in self.ranges:
            cut = slice(part.start, part.stop)
            yield Run(
                manager.tensor(aligned.parameter, tier)[cut],
                manager.tensor(aligned.gradient, tier)[cut],
                None if aligned.master is None else manager.tensor(aligned.master, tier)[cut],
                {name: manager.tensor(chunk, tier)[cut] for name, chunk in aligned.states.items()},
                part.step,
                part.layout,
            )


def update_uses(aligned: AlignedChunks, tier: int, *, remade: bool) -> tuple[Use, ...]:
    """The chunks that an update of `aligned` needs on `tier`, and how.

    Parameters that are all made anew from their masters need not be there before. So once the
    backward is through with them they can leave without being saved, and their room is free for
    what the step needs.

    Args:
        remade: every parameter of the chunk takes part, and none was changed from Python.
    """
    assert aligned.gradient is not None
    anew = remade and aligned.master is not None
    uses = [
        Use(aligned.gradient.id, Access.READ, tier),
        Use(aligned.parameter.id, Access.OVERWRITE if anew else Access.UPDATE, tier),
    ]
    if aligned.master is not None:
        uses.append(Use(aligned.master.id, Access.UPDATE, tier))
    uses += [Use(chunk.id, Access.UPDATE, tier) for chunk in aligned.states.values()]
    return tuple(uses)


def _kept(value: Any) -> Any:
    """A hyperparameter as it is now, whatever a scheduler does to it afterwards."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _ranges(aligned: AlignedChunks) -> Iterator[Range]:
    for slots in _alike(aligned.slots):
        start, stop = slots[0].offset, slots[-1].offset + slots[-1].numel
        whole = len(slots) == len(aligned.slots)
        layout = aligned.layout() if whole else aligned.layout().cut(start, stop)
        yield Range(start, stop, slots[0].step + 1, layout)


def _alike(slots: list[Slot]) -> Iterator[list[Slot]]:
    run: list[Slot] = []
    for slot in slots:
        if run and (not slot.has_grad or slot.step != run[0].step):
            yield run
            run = []
        if slot.has_grad:
            run.append(slot)
    if run:
        yield run


def start_states(state: ModelState, aligned: AlignedChunks, hyper: dict[str, Any]) -> None:
    """Give states their first values before the first update; the caller holds their chunks."""
    if aligned.started:
        return
    aligned.started = True
    for specification in state.rule.states(hyper):
        if specification.init:
            chunk = aligned.states[specification.name]
            state.manager.tensor(chunk, state.update_tier).fill_(specification.init)


def follow_parameters(state: ModelState, aligned: AlignedChunks) -> None:
    """Let the masters follow parameters that were changed from Python since the last update.

    Where a parameter is still the rounding of its master, nobody changed it and the master keeps
    its full precision.
    """
    aligned.changed = False
    if aligned.master is None:
        return
    parameter = state.manager.tensor(aligned.parameter, state.update_tier)
    master = state.manager.tensor(aligned.master, state.update_tier)
    differs = parameter != master.to(parameter.dtype)
    if bool(differs.any()):
        torch.where(differs, parameter.float(), master, out=master)
