"""An optimizer whose states live in managed chunks, for runs that belong to somebody else.

`ChunkedAdamW` is an ordinary `torch.optim.Optimizer` over ordinary tensors. Its moments, and for
16-bit parameters its fp32 master weights, live in chunks over host memory and disk inside a budget;
parameters and gradients stay where their owner keeps them. So it brings PatrickStar into a run
whose data parallelism is DeepSpeed's ZeRO-1/2 (as the client optimizer, where it replaces
ZeRO-Offload), DDP, a sharded optimizer of torch's, or FSDP2, whose parameters are DTensors: the
local part is what is updated.

States are laid out at the first step, for whatever tensors the parameter groups hold by then, since
DeepSpeed exchanges them after construction. A tensor longer than a chunk is cut over several.

`state` is empty, but what somebody puts there is taken into the chunks: torch's
ZeroRedundancyOptimizer loads a checkpoint that way, and not by `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from patrickstar.errors import ConfigError
from patrickstar.memory import (
    Access,
    Chunk,
    ChunkManager,
    MemoryReport,
    Use,
)
from patrickstar.memory.budgets import tiers_of
from patrickstar.memory.layout import ALIGN
from patrickstar.optim.adam import AdamW
from patrickstar.optim.layout import Layout, Segment
from patrickstar.optim.update import Run, Scratch, UpdateRule

_LONGEST = 1 << 22  # elements of a chunk when nothing asks for less


@dataclass(eq=False)
class _Piece:
    """A range of one parameter and its place in a chunk."""

    parameter: Tensor
    start: int
    stop: int
    offset: int

    def layout(self, numel: int) -> Layout:
        return Layout((Segment(0, (numel,), self.start, self.stop - self.start),))


@dataclass(eq=False)
class _Shelf:
    """Aligned chunks of states, and the pieces that lie in them."""

    group: int
    pieces: list[_Piece]
    states: dict[str, Chunk]
    master: Chunk | None
    filled: set[int] = field(default_factory=set)  # pieces whose masters and states have begun

    def chunks(self) -> list[Chunk]:
        return [*self.states.values(), *([self.master] if self.master is not None else [])]


class ChunkedAdamW(torch.optim.Optimizer):
    """AdamW with its states in chunks; the bits of `torch.optim.AdamW(fused=True)`.

    Args:
        params: parameters or parameter groups, as for any optimizer.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        memory: budgets: `{"host": "4GiB", "disk": "/scratch"}`. `disk` takes `"PATH"`,
            `"PATH:SIZE"` or `{"path": ..., "size": ...}`. Without a budget all states stay in host
            memory.
        chunk_size: the longest chunk, in elements; by default a share of the budget.

    Raises:
        ConfigError: a wrong hyperparameter or budget.
        BudgetError: at the first step, if one chunk's states do not fit the host budget.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        memory: Mapping[str, Any] | None = None,
        chunk_size: int | None = None,
    ) -> None:
        self._rule: UpdateRule = AdamW()
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._rule.check({**self._rule.defaults, **given})
        super().__init__(params, {**self._rule.defaults, **given})
        tiers = tiers_of(memory or {})
        budget = tiers[0].capacity
        self._manager = ChunkManager(tiers)
        # An update holds three chunks of four bytes, and the next three are on their way.
        share = _LONGEST if budget is None else max(ALIGN, budget // 48 // ALIGN * ALIGN)
        self._limit = chunk_size or min(_LONGEST, share)
        self._shelves: list[_Shelf] = []
        self._known: dict[int, list[tuple[_Shelf, _Piece]]] = {}
        self._steps: dict[int, int] = {}
        self._scratch = Scratch()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluated first if given, with gradients enabled; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._lay_out()
        self._take_over()
        with_gradient = {
            id(p) for group in self.param_groups for p in group["params"] if p.grad is not None
        }
        for parameter in with_gradient:
            self._steps[parameter] = self._steps.get(parameter, 0) + 1
        self._manager.begin_iteration("step")
        self._manager.segment("step")
        for shelf in self._shelves:
            pieces = [p for p in shelf.pieces if id(p.parameter) in with_gradient]
            if pieces:
                self._update(shelf, pieces)
        self._manager.end_iteration()
        return loss

    def memory_report(self) -> MemoryReport:
        """Bytes of states on every tier, and bytes moved so far."""
        return self._manager.report()

    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's: the states of every parameter as tensors of their own, in memory."""
        self._take_over()
        found = super().state_dict()
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._steps:
                    found["state"][index] = self._gather(parameter)
                index += 1
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take states from `state_dict`, of this class or of `torch.optim.AdamW`."""
        state = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        self._lay_out()
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if index in state:
                    self._scatter(parameter, state[index])
                index += 1

    def close(self) -> None:
        """Give the states' memory and disk space back; the optimizer cannot step any more."""
        self._manager.close()

    # Inside

    def _lay_out(self) -> None:
        """Give chunks to parameters that have none yet."""
        for index, group in enumerate(self.param_groups):
            waiting: list[_Piece] = []
            length, low = 0, False
            for parameter in group["params"]:
                if id(parameter) in self._known:
                    continue
                self._known[id(parameter)] = []
                numel = _local(parameter).numel()
                narrow = _local(parameter).dtype is not torch.float32
                for start in range(0, numel, self._limit):
                    stop = min(start + self._limit, numel)
                    padded = -(-(stop - start) // ALIGN) * ALIGN
                    if waiting and (length + padded > self._limit or narrow != low):
                        self._shelve(index, waiting, length, low)
                        waiting, length = [], 0
                    waiting.append(_Piece(parameter, start, stop, length))
                    length, low = length + padded, narrow
            if waiting:
                self._shelve(index, waiting, length, low)

    def _take_over(self) -> None:
        """Move what was put into `state` from outside into the chunks."""
        if not self.state:
            return
        self._lay_out()
        for group in self.param_groups:
            for parameter in group["params"]:
                # Others may look into `state`, which makes an empty entry, or keep their own there.
                if "step" in self.state.get(parameter, ()):
                    self._scatter(parameter, self.state[parameter])
                    del self.state[parameter]

    def _shelve(self, group: int, pieces: list[_Piece], length: int, low: bool) -> None:
        create = self._manager.create
        names = [spec.name for spec in self._rule.states(self.param_groups[group])]
        states = {name: create(length, torch.float32, name) for name in names}
        master = create(length, torch.float32, "master") if low else None
        shelf = _Shelf(group, list(pieces), states, master)
        self._shelves.append(shelf)
        for piece in pieces:
            self._known[id(piece.parameter)].append((shelf, piece))

    def _update(self, shelf: _Shelf, pieces: list[_Piece]) -> None:
        uses = [Use(chunk.id, Access.UPDATE) for chunk in shelf.chunks()]
        with self._manager.use(uses):
            for piece in pieces:
                weights = _local(piece.parameter)
                flat, grad = _flat(weights), _flat(_local(piece.parameter.grad))
                part = slice(piece.start, piece.stop)
                place = slice(piece.offset, piece.offset + piece.stop - piece.start)
                master = None
                if shelf.master is not None:
                    master = self._manager.tensor(shelf.master)[place]
                    if id(piece) not in shelf.filled:
                        master.copy_(flat[part])
                shelf.filled.add(id(piece))
                here = flat[part].cpu()
                run = Run(
                    here,
                    grad[part].cpu(),
                    master,
                    {n: self._manager.tensor(c)[place] for n, c in shelf.states.items()},
                    self._steps[id(piece.parameter)],
                    piece.layout(weights.numel()),
                )
                self._rule.apply([run], self.param_groups[shelf.group], scratch=self._scratch)
                if here.data_ptr() != flat[part].data_ptr():
                    flat[part].copy_(here)
                if flat.data_ptr() != weights.data_ptr():
                    weights.copy_(flat.view(weights.shape))

    def _gather(self, parameter: Tensor) -> dict[str, Any]:
        shape = _local(parameter).shape
        found: dict[str, Any] = {"step": torch.tensor(float(self._steps[id(parameter)]))}
        for shelf, piece in self._known[id(parameter)]:
            named = {**shelf.states, **({"master": shelf.master} if shelf.master else {})}
            for name, chunk in named.items():
                whole = found.setdefault(name, torch.empty(shape.numel()))
                with self._manager.use([Use(chunk.id, Access.READ)]):
                    place = slice(piece.offset, piece.offset + piece.stop - piece.start)
                    whole[piece.start : piece.stop] = self._manager.tensor(chunk)[place]
        return {name: t if name == "step" else t.view(shape) for name, t in found.items()}

    def _scatter(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        self._steps[id(parameter)] = int(state["step"])
        for shelf, piece in self._known[id(parameter)]:
            named = {**shelf.states, **({"master": shelf.master} if shelf.master else {})}
            for name, chunk in named.items():
                # A state of torch's has no masters: they start from the parameters.
                value = state.get(name, _local(parameter) if name == "master" else None)
                if value is None or value.numel() != _local(parameter).numel():
                    raise ConfigError(
                        f"the optimizer state has no {name!r} of {_local(parameter).numel()} "
                        "elements for a parameter; it belongs to another model or optimizer"
                    )
                with self._manager.use([Use(chunk.id, Access.UPDATE)]):
                    place = slice(piece.offset, piece.offset + piece.stop - piece.start)
                    flat = value.detach().reshape(-1)[piece.start : piece.stop]
                    self._manager.tensor(chunk)[place].copy_(flat)
            shelf.filled.add(id(piece))


def _local(tensor: Any) -> Tensor:
    """The part of a tensor that this rank holds: DTensors of FSDP2 have one."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)
