"""What surrounds an update: the global norm, overflow, clipping, the loss scale, the schedule."""

from __future__ import annotations

import math
from typing import Any

import torch

from patrickstar.engine.precision import Precision
from patrickstar.engine.state import ModelState, Slot
from patrickstar.optim import GradScale
from patrickstar.optim.clip import combine_norms, torch_clip_coef


class Stepping:
    """Decides before each step by which factors gradients are multiplied, or that it is skipped.

    Args:
        clipping: the largest global norm, 0 for none.
        scheduler: stepped after every update that was made.
    """

    def __init__(
        self,
        state: ModelState,
        precision: Precision,
        clipping: float,
        scheduler: Any | None = None,
    ) -> None:
        self._state, self._precision = state, precision
        self._clipping = clipping
        self.scheduler = scheduler
        self._norms: dict[int, torch.Tensor] = {}
        self.grad_norm: float | None = None

    def collected(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Note the norm of a gradient while it is still in the processor's cache."""
        wide = gradient if gradient.dtype is torch.float32 else gradient.float()
        self._norms[slot.index] = torch.linalg.vector_norm(wide)

    def before(self) -> GradScale | None:
        """The factors for this step's gradients; None if they have overflowed."""
        norms = [
            self._norms[slot.index]
            for _, slot in sorted(self._state.slots.values(), key=lambda pair: pair[1].index)
            if slot.has_grad
        ]
        total = combine_norms(norms)
        scale = self._precision.loss_scale
        norm = total / scale if scale != 1.0 else total
        self.grad_norm = float(norm)
        if self._precision.scaler is not None and not math.isfinite(self.grad_norm):
            return None
        factors: list[float | torch.Tensor] = []
        if scale != 1.0:
            factors.append(1.0 / scale)
        if self._clipping > 0:
            factors.append(torch_clip_coef(norm, self._clipping))
        return factors or 1.0

    def after(self, updated: bool) -> None:
        self._norms.clear()
        if self._precision.scaler is not None:
            self._precision.scaler.update_scale(not updated)
        if updated and self.scheduler is not None:
            self.scheduler.step()
