"""The model state in aligned chunks.

Parameters of one optimizer group lie in chunks in the order of the model. For every parameter chunk
of trainable parameters there is a gradient chunk, a chunk of fp32 master weights when training in
16 bits, and a chunk for each state tensor of the optimizer, all with the same layout: index i is
the same weight in each. One optimizer step of these weights is one pass over these flat tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from patrickstar.engine.aligned import AlignedChunks, Slot, settle_in, shard_chunks
from patrickstar.engine.alone import Beginnings, StoredNames, is_alone
from patrickstar.engine.construct import Nursery, view_of
from patrickstar.engine.home import ChunkHome
from patrickstar.engine.parameter import ManagedParameter, manage
from patrickstar.engine.pieces import PiecedParameter, piece_name
from patrickstar.engine.safe_modules import low_parameters
from patrickstar.engine.sharding import MOST_GATHERED, Sharding
from patrickstar.engine.split import Spread, spread_of
from patrickstar.memory import Access, Chunk, ChunkManager, Use
from patrickstar.memory.layout import Layout, choose_limit, pack
from patrickstar.optim import UpdateRule

_MOST_CHUNKS, _SHORT = 64, 1 << 18  # of a model on several ranks; elements that are sent at once
_PLAIN = torch._C.DisableTorchFunctionSubclass


def in_pieces(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Named parameters, with the pieces of those that are kept in pieces."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, PiecedParameter):
            for start, stop, piece in parameter.rows():
                with _PLAIN():  # what needs no data brings no chunk
                    piece.requires_grad_(parameter.requires_grad)
                yield piece_name(name, start, stop), piece
        else:
            yield name, parameter


@dataclass(frozen=True)
class StateSpecification:
    """What the state of a run consists of.

    Attributes:
        dtype: of the parameters during training.
        grad_dtype: of the accumulated gradients.
        master: whether fp32 master weights are kept beside them.
        round_masters: masters start from the rounded parameters, as DeepSpeed's do.
        limit: the longest chunk, in elements, or None to choose.
        budget: of the tier that updates run on, in bytes; guides the choice.
        update_on: the name of that tier.
    """

    dtype: torch.dtype
    grad_dtype: torch.dtype
    master: bool
    round_masters: bool
    limit: int | None
    budget: int | None
    update_on: str = "host"

    def bytes_per_element(self, states: int) -> int:
        """Bytes that an update holds for one weight."""
        wide = (states + int(self.master)) * 4
        return self.dtype.itemsize + self.grad_dtype.itemsize + wide


class Family(NamedTuple):
    """What parameters must have in common to lie in one chunk.

    Attributes:
        group: of the optimizer's, -1 for none.
        low: whether their gradients travel in the precision of autocast.
        spread: where the other parts of them are.
        alone: whether this rank has them for itself.
    """

    group: int
    trainable: bool
    low: bool
    spread: Spread
    alone: bool


class ModelState:
    """All managed parameters of a model in their final chunks.

    Args:
        groups: the optimizer's parameter groups, each with `params` and its hyperparameters.
        rule: the optimizer's formula, which names the states.
        sharding: shares chunks among the ranks that train together, if they are several.
        stored: what checkpoints call the parameters that ranks have for themselves.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[dict[str, Any]],
        rule: UpdateRule,
        specification: StateSpecification,
        manager: ChunkManager,
        home: ChunkHome,
        sharding: Sharding | None = None,
        stored: StoredNames | None = None,
    ) -> None:
        self.stored, self.beginnings = stored or StoredNames(), Beginnings()
        self.manager, self.home, self.rule = manager, home, rule
        self.sharding = home.sharding = sharding
        self.ranks = None if sharding is None else sharding.ranks
        self.update_tier = [tier.name for tier in manager.tiers].index(specification.update_on)
        self.specification = specification
        self.aligned: list[AlignedChunks] = []
        self.slots: dict[int, tuple[AlignedChunks, Slot]] = {}
        self.unmanaged: list[tuple[str, nn.Parameter]] = []
        self.utilisation = 1.0
        self._of_chunk: dict[int, AlignedChunks] = {}
        self._build(module, groups)

    @property
    def limit(self) -> int:
        """The longest chunk, in elements."""
        return max((a.parameter.numel for a in self.aligned), default=0)

    def of(self, parameter: nn.Parameter) -> tuple[AlignedChunks, Slot]:
        """The chunks and the slot of a managed parameter."""
        return self.slots[id(parameter)]

    def of_chunk(self, chunk: int) -> AlignedChunks | None:
        return self._of_chunk.get(chunk)

    def slot_at(self, chunk: int, offset: int) -> Slot | None:
        """The parameter that covers element `offset` of a parameter chunk."""
        aligned = self._of_chunk.get(chunk)
        return None if aligned is None else aligned.slot_at(offset)

    def _build(self, module: nn.Module, groups: Sequence[dict[str, Any]]) -> None:
        group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        families: dict[Family, list[Slot]] = {}
        low = set() if self.ranks is None else low_parameters(module, self.ranks.low_classes)
        for name, parameter in in_pieces(module):
            if type(parameter) is not ManagedParameter:
                self.unmanaged.append((name, parameter))
                continue
            with _PLAIN():
                slot = Slot(
                    name,
                    parameter,
                    len(self.slots),
                    0,
                    parameter.numel(),
                    parameter.shape,
                    parameter.stride(),
                )
                trainable = parameter.requires_grad and id(parameter) in group_of
            alone = self.ranks is not None and is_alone(parameter)
            self.slots[id(parameter)] = (None, slot)  # type: ignore[assignment]
            key = Family(
                group_of.get(id(parameter), -1),
                trainable,
                trainable and id(parameter) in low and not alone,
                spread_of(parameter),
                alone,
            )
            families.setdefault(key, []).append(slot)
        limit = self.specification.limit or self._choose_limit(families, groups)
        if self.ranks is not None:  # budgets may differ, chunks may not
            limit = self.ranks.least(limit)
        used = length = 0
        for family, slots in families.items():
            layout = pack([slot.numel for slot in slots], limit)
            used, length = used + layout.used, length + sum(layout.lengths)
            hyper = groups[family.group] if family.group >= 0 else {}
            self._place(family, slots, layout, hyper)
        self.utilisation = used / length if length else 1.0

    def _choose_limit(
        self, families: dict[Family, list[Slot]], groups: Sequence[dict[str, Any]]
    ) -> int:
        largest = max(families.values(), key=lambda slots: sum(s.numel for s in slots), default=[])
        states = len(self.rule.states(groups[0])) if groups else 0
        per_element = self.specification.bytes_per_element(states)
        numels, budget = [s.numel for s in largest], self.specification.budget
        if self.ranks is None:
            return choose_limit(numels, per_element, budget)
        # A few chunks are whole on a rank at a time: they must be a small part of the model.
        longest = min(max(sum(numels) // _MOST_CHUNKS, _SHORT), choose_limit(numels, 1, None))
        return choose_limit(numels, per_element, budget, largest=longest)

    def _place(
        self,
        family: Family,
        slots: list[Slot],
        layout: Layout,
        hyper: dict[str, Any],
    ) -> None:
        spec, create = self.specification, self.manager.create
        first = len(self.aligned)
        for length in layout.lengths:
            numel = max(length, 1)
            if self.ranks is not None and not family.alone:
                numel = self.ranks.padded(numel)
            parameter = create(numel, spec.dtype, "parameter")
            aligned = AlignedChunks(
                family.group,
                [],
                parameter,
                stop=numel,
                low=family.low,
                spread=family.spread,
                alone=family.alone,
            )
            if family.trainable:
                aligned.gradient = create(numel, spec.grad_dtype, "gradient")
                if spec.master:
                    aligned.master = create(numel, torch.float32, "master")
                for state in self.rule.states(hyper):
                    aligned.states[state.name] = create(numel, torch.float32, state.name)
            self.aligned.append(aligned)
            self._of_chunk[aligned.parameter.id] = aligned
        for slot, placement in zip(slots, layout.placements, strict=True):
            aligned = self.aligned[first + placement.chunk]
            slot.offset = placement.offset
            aligned.slots.append(slot)
            self.slots[id(slot.parameter)] = (aligned, slot)
        if self.sharding is not None:
            for aligned in self.aligned[first:]:
                if aligned.alone:
                    for chunk in aligned.chunks():
                        self.sharding.keep_alone(chunk)
                else:
                    shard_chunks(aligned, self.sharding)

    def move_in(self, nursery: Nursery) -> None:
        """Copy every parameter from the construction chunks to its final place.

        Construction chunks are given up as soon as the last parameter has left them, so the
        budget is kept all the way.
        """
        self.home.move_to_new_data, self.home.laid_out = None, True
        left: dict[int, int] = {chunk.id: 0 for chunk in nursery.chunks}
        chunk_of: dict[int, int] = {}
        for aligned in self.aligned:
            for slot in aligned.slots:
                with _PLAIN():
                    storage = slot.parameter.untyped_storage()._cdata
                source = nursery.manager.chunk_of(storage)
                assert source is not None, "a managed parameter lives in a chunk"
                chunk_of[slot.index] = source
                left[source] += 1
        self._give_up(nursery, left)
        for aligned in self.aligned:
            targets = [Use(aligned.parameter.id, Access.UPDATE)]
            if aligned.master is not None:
                targets.append(Use(aligned.master.id, Access.UPDATE, self.update_tier))
            for slot in aligned.slots:
                source = chunk_of[slot.index]
                with self._both(targets, nursery, Use(source, Access.READ)):
                    self._move(aligned, slot)
                left[source] -= 1
                if not left[source]:
                    self._give_up(nursery, left)
            if self.sharding is not None and not aligned.alone:
                alike = nursery.sharding is not None
                settle_in(aligned, self.sharding, self.manager, alike=alike)

    @contextmanager
    def _both(self, targets: list[Use], nursery: Nursery, source: Use) -> Iterator[None]:
        if nursery.manager is self.manager:
            with self.manager.use([*targets, source]):
                yield
        else:
            with nursery.manager.use([source]), self.manager.use(targets):
                yield

    def _move(self, aligned: AlignedChunks, slot: Slot) -> None:
        flat = self.manager.tensor(aligned.parameter)
        data = view_of(flat, slot.offset, slot.shape, slot.stride)
        with _PLAIN(), torch.no_grad():
            old = slot.parameter.data
            data.copy_(old)
            if aligned.alone:
                self.beginnings.add(slot.name, old)
            if aligned.master is not None:
                masters = self.manager.tensor(aligned.master, self.update_tier)
                master = view_of(masters, slot.offset, slot.shape, slot.stride)
                master.copy_(data if self.specification.round_masters else old)
            del old
        manage(slot.parameter, data, self.home)
        self.manager.keep_view(aligned.parameter, slot.parameter)

    def _give_up(self, nursery: Nursery, left: dict[int, int]) -> None:
        for chunk in list(nursery.chunks):
            if not left[chunk.id]:
                nursery.give_up(chunk)

    def clear(self, chunk: Chunk) -> None:
        """The contents of `chunk` are zeros, on all ranks."""
        if self.sharding is not None and self.sharding.is_sharded(chunk):
            self.sharding.clear(chunk)
        else:
            self.manager.release(chunk)

    def smallest_update(self) -> int:
        """Bytes that the largest update holds at once."""
        return max((sum(own.nbytes for _, own in a.updated()) for a in self.aligned), default=0)

    def total_bytes(self) -> int:
        """Bytes of the state that this rank keeps, with what it may hold for a while."""
        kept = sum(chunk.nbytes for a in self.aligned for chunk in a.kept())
        if self.sharding is None:
            return kept
        shared = [aligned for aligned in self.aligned if not aligned.alone]
        gradients = sum(a.gradient.nbytes for a in shared if a.gradient is not None)
        largest = max((chunk.nbytes for a in shared for chunk in a.chunks()), default=0)
        return kept + gradients + (MOST_GATHERED + 1) * largest
