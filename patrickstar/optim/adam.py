"""AdamW and Adam, with the bits of ``torch.optim.AdamW(fused=True)`` and ``Adam(fused=True)``.

Kingma and Ba, "Adam: a method for stochastic optimization", algorithm 1; Loshchilov and Hutter,
"Decoupled weight decay regularization", algorithm 2. AdamW shrinks the weight by ``lr *
weight_decay`` before the step; Adam adds ``weight_decay * weight`` to the gradient (L2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patrickstar.optim.update import (
    GradScale,
    Hyper,
    Run,
    Scratch,
    StateSpec,
    check_adam_like,
)
from patrickstar.optim.walk import Kernel, update_runs


@dataclass(frozen=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay.

    Hyperparameters: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``amsgrad``, ``maximize`` as in
    `torch.optim.AdamW`, and ``bias_correction`` (DeepSpeed's; False leaves both moments as they
    are). States: ``exp_avg``, ``exp_avg_sq`` and, with amsgrad, ``max_exp_avg_sq``.
    """

    name: str = "AdamW"
    decoupled: bool = True

    @property
    def per_tensor(self) -> bool:
        """False: elementwise."""
        return False

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of `torch.optim.AdamW` (of `torch.optim.Adam` for Adam)."""
        return {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2 if self.decoupled else 0.0,
            "amsgrad": False,
            "maximize": False,
            "bias_correction": True,
        }

    def states(self, hyper: Hyper) -> tuple[StateSpec, ...]:
        """Both moments, and the running maximum of the second with amsgrad; all start at 0."""
        names = ["exp_avg", "exp_avg_sq"]
        if hyper.get("amsgrad", False):
            names.append("max_exp_avg_sq")
        return tuple(StateSpec(name) for name in names)

    def check(self, hyper: Hyper) -> None:
        """Raise `ConfigError` for a negative rate, eps or decay, or a beta outside [0, 1)."""
        check_adam_like(self.name, hyper)

    def apply(
        self,
        runs: Sequence[Run],
        hyper: Hyper,
        *,
        grad_scale: GradScale = 1.0,
        scale_in_grad_dtype: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        """Update the runs in place; see `UpdateRule.apply`."""
        amsgrad = bool(hyper.get("amsgrad", False))
        fused = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        beta1, beta2 = hyper["betas"]

        def kernel_of(run: Run) -> Kernel:
            # With an infinite step count beta ** step is 0, so the correction divides by 1.
            count = float(run.step) if hyper.get("bias_correction", True) else math.inf
            step = torch.tensor(count, device=run.weight.device)

            def kernel(
                weights: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]
            ) -> None:
                fused(
                    weights,
                    grads,
                    states[0],
                    states[1],
                    states[2] if amsgrad else [],
                    [step] * len(weights),
                    amsgrad=amsgrad,
                    lr=hyper["lr"],
                    beta1=float(beta1),
                    beta2=float(beta2),
                    weight_decay=float(hyper["weight_decay"]),
                    eps=float(hyper["eps"]),
                    maximize=bool(hyper.get("maximize", False)),
                )

            return kernel

        update_runs(
            runs,
            [spec.name for spec in self.states(hyper)],
            kernel_of,
            grad_scale=grad_scale,
            scale_in_grad_dtype=scale_in_grad_dtype,
            scratch=scratch,
            fused=True,
        )


@dataclass(frozen=True, slots=True)
class Adam(AdamW):
    """Adam whose weight decay is an L2 term in the gradient."""

    name: str = "Adam"
    decoupled: bool = False
