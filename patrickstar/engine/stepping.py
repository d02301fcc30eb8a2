"""What surrounds an update: the global norm, overflow, clipping, the loss scale, the schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from patrickstar.engine.aligned import AlignedChunks, Slot
from patrickstar.engine.early import EarlyUpdates
from patrickstar.engine.precision import Precision
from patrickstar.engine.ranks import Ranks
from patrickstar.engine.state import ModelState
from patrickstar.optim import (
    BlockSums,
    GradScale,
    Widened,
    combine_norms,
    deepspeed_clip_coef,
    torch_clip_coef,
)


class ShardNorms:
    """Norms of gradients that are kept in shards.

    They are taken of the shards at every stage of ZeRO, per chunk and in float64, so the stage does
    not change the clip factor.

    Args:
        ranks: those that share the gradients.
        aligned: the chunks, in an order that all ranks have.
    """

    def __init__(self, ranks: Ranks, aligned: Sequence[AlignedChunks]) -> None:
        self._ranks = ranks
        self._squares: dict[int, float] = {}
        self._spreads = {a.slots[0].index: a.spread for a in aligned if not a.alone}
        self._alone: dict[Slot, float] = {}
        (self._any_alone,) = ranks.anywhere([any(a.alone for a in aligned)])

    def measure(self, aligned: AlignedChunks, own: torch.Tensor) -> None:
        """Note the norm of this rank's part of the gradients while it is in cache."""
        sums = BlockSums(own.numel())
        sums.add(own)
        self._squares[aligned.slots[0].index] = float(sums.total())

    def measure_alone(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Note the norm of a gradient that only this rank has."""
        sums = BlockSums(gradient.numel())
        sums.add(gradient.reshape(-1))
        self._alone[slot] = float(sums.total())

    def total(self) -> float:
        """The norm over all ranks; called on all of them."""
        squares = dict.fromkeys(self._spreads.values(), 0.0)
        for index in sorted(self._squares):
            squares[self._spreads[index]] += self._squares[index]
        sums = self._ranks.sum_of_shards([*squares.values()])
        total = sum(
            spread.sum([here])[0] if spread.groups else here
            for spread, here in zip(squares, sums, strict=True)
        )
        if self._any_alone:
            own = sorted(
                (slot.index, square) for slot, square in self._alone.items() if slot.has_grad
            )
            total += self._ranks.comm.reductions.sum([sum(square for _, square in own)])[0]
        return math.sqrt(total) if total >= 0 else math.nan

    def clear(self) -> None:
        self._squares.clear()
        self._alone.clear()


class Stepping:
    """Decides before each step by which factors gradients are multiplied, or that it is skipped.

    Args:
        clipping: the largest global norm, 0 for none.
        exact: take norms and clip in DeepSpeed's arithmetic instead of PyTorch's.
        early: knows which gradients have been used before the step.
        skip_overflow: skip a step whose gradients are not finite, loss scale or not.
        shard_norms: has the norms where several ranks share the gradients.

    Attributes:
        scheduler: stepped after every update that was made, if there is one.
        grad_norm: the global norm at the last step, unscaled, before clipping.
        applied: whether the last step made its update.
    """

    def __init__(
        self,
        state: ModelState,
        precision: Precision,
        clipping: float,
        early: EarlyUpdates,
        *,
        exact: bool = False,
        skip_overflow: bool = False,
        shard_norms: ShardNorms | None = None,
    ) -> None:
        self._shard_norms = shard_norms
        self._state, self._precision, self._early = state, precision, early
        self._clipping, self._exact, self._skip_overflow = clipping, exact, skip_overflow
        self._norms: dict[int, torch.Tensor | float] = {}
        self._widened = Widened()
        self._clip_next: float | None = None
        self.scheduler: Any | None = None
        self.grad_norm: float | None = None
        self.applied = False

    def collected(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Note the norm of a gradient while it is still in the processor's cache."""
        if self._shard_norms is not None:
            self._shard_norms.measure_alone(slot, gradient)
        elif self._exact:
            sums = BlockSums(gradient.numel())
            sums.add(gradient.reshape(-1))
            self._norms[slot.index] = sums.total()
        else:
            self._norms[slot.index] = torch.linalg.vector_norm(self._widened.of(gradient))

    def backward_is_over(self) -> None:
        """No gradient comes for now; what is kept to take their norms would be in the way."""
        self._widened.release()

    def clip_next(self, max_norm: float) -> torch.Tensor:
        """The norm of the gradients so far, unscaled; the coming step clips them to `max_norm`."""
        self._clip_next = float(max_norm)
        return torch.as_tensor(self._total() / self._precision.loss_scale)

    def of_early_updates(self) -> GradScale:
        """The factors for gradients whose norm nobody waits for."""
        return deepspeed_clip_coef(torch.tensor(0.0), 0.0, 1.0) if self._exact else 1.0

    def before(self) -> GradScale | None:
        """The factors for this step's gradients; None if they have overflowed."""
        self._widened.release()
        total = self._total()
        scale = self._precision.loss_scale
        self.grad_norm = float(total) / scale
        scaler = self._precision.scaler
        if scaler is not None:
            # The norm is infinite or not a number exactly if some gradient is.
            settled = scaler.settle(not math.isfinite(self.grad_norm))
            if settled is None:
                return None
            scale = settled
        elif self._skip_overflow and not math.isfinite(self.grad_norm):
            return None
        clipping = self._clipping if self._clip_next is None else self._clip_next
        if math.isinf(clipping):
            clipping = 0.0
        if self._exact:
            return deepspeed_clip_coef(total, clipping, scale)
        factors: list[float | torch.Tensor] = []
        if scale != 1.0:
            factors.append(1.0 / scale)
        if clipping > 0:
            factors.append(torch_clip_coef(total / scale, clipping))
        return factors or 1.0

    def after(self, updated: bool) -> None:
        self.applied = updated
        self._clip_next = None
        self._norms.clear()
        if self._shard_norms is not None:
            self._shard_norms.clear()
        if updated and self.scheduler is not None:
            self.scheduler.step()

    def _total(self) -> torch.Tensor:
        if self._shard_norms is not None:
            wide = torch.float64 if self._exact else torch.float32
            return torch.tensor(self._shard_norms.total(), dtype=wide)
        slots = sorted((slot for _, slot in self._state.slots.values()), key=lambda s: s.index)
        used = self._early.updated
        norms = [self._norms[s.index] for s in slots if s.has_grad or s.index in used]
        if self._exact:
            return torch.tensor(math.sqrt(sum(float(n) for n in norms)), dtype=torch.float64)
        # On the CPU, wherever the gradients are: it decides what the host does next.
        return combine_norms([n for n in norms if isinstance(n, torch.Tensor)]).cpu()
