"""The update of one chunk's weights, decided at one time and made then or later.

`optimizer.step()` decides: which parameters take part, the number of the step, the factors for the
gradients and the hyperparameters as they are now. Making the update needs nothing but the chunks,
so it can be put off until the weights are used next (see `owed`) and has the same bits then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from patrickstar.engine.aligned import AlignedChunks, Slot
from patrickstar.engine.state import ModelState
from patrickstar.memory import Access, Chunk, Use
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
        flat = own_tensors(state, aligned)
        if aligned.changed:
            aligned.changed = False
            if aligned.master is not None:
                follow_parameters(flat[aligned.parameter], flat[aligned.master])
        start_states(state, aligned, self.hyper, flat)
        runs = [self._run(flat, part) for part in self.ranges]
        state.rule.apply(runs, self.hyper, grad_scale=self.scale, scratch=scratch)

    def _run(self, flat: Mapping[Chunk, torch.Tensor], part: Range) -> Run:
        aligned, cut = self.aligned, slice(part.start, part.stop)
        assert aligned.gradient is not None
        return Run(
            flat[aligned.parameter][cut],
            flat[aligned.gradient][cut],
            None if aligned.master is None else flat[aligned.master][cut],
            {name: flat[chunk][cut] for name, chunk in aligned.states.items()},
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
    own = dict(aligned.updated())
    assert aligned.gradient is not None
    anew = remade and aligned.master is not None
    uses = [
        Use(own[aligned.gradient].id, Access.READ, tier),
        Use(own[aligned.parameter].id, Access.OVERWRITE if anew else Access.UPDATE, tier),
    ]
    if aligned.master is not None:
        uses.append(Use(own[aligned.master].id, Access.UPDATE, tier))
    uses += [Use(own[chunk].id, Access.UPDATE, tier) for chunk in aligned.states.values()]
    return tuple(uses)


def _kept(value: Any) -> Any:
    """A hyperparameter as it is now, whatever a scheduler does to it afterwards."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _ranges(aligned: AlignedChunks) -> Iterator[Range]:
    """Ranges are counted from the first weight that this rank updates."""
    for slots in _alike(aligned.slots):
        start = max(slots[0].offset, aligned.start)
        stop = min(slots[-1].offset + slots[-1].numel, aligned.stop)
        if start < stop:
            whole = len(slots) == len(aligned.slots)
            start, stop = start - aligned.start, stop - aligned.start
            layout = aligned.own_layout()
            if start or not whole:
                layout = layout.cut(start, stop)
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


def own_tensors(state: ModelState, aligned: AlignedChunks) -> dict[Chunk, torch.Tensor]:
    """The weights that this rank updates, as each chunk has them; the chunks are in use."""
    found = {}
    for chunk, own in aligned.updated():
        flat = state.manager.tensor(own, state.update_tier)
        whole = flat.numel() > aligned.stop - aligned.start
        found[chunk] = flat[aligned.start : aligned.stop] if whole else flat
    return found


def start_states(
    state: ModelState,
    aligned: AlignedChunks,
    hyper: dict[str, Any],
    flat: Mapping[Chunk, torch.Tensor],
) -> None:
    """Give states their first values before the first update.

    Args:
        flat: tensors over the chunks of the states, which are in use.
    """
    if aligned.started:
        return
    aligned.started = True
    for specification in state.rule.states(hyper):
        if specification.init:
            flat[aligned.states[specification.name]].fill_(specification.init)


def follow_parameters(parameter: torch.Tensor, master: torch.Tensor) -> None:
    """Let masters follow parameters that were changed from Python since the last update.

    Where a parameter is still the rounding of its master, nobody changed it and the master keeps
    its full precision.
    """
    differs = parameter != master.to(parameter.dtype)
    if bool(differs.any()):
        torch.where(differs, parameter.float(), master, out=master)
