"""Lion: the sign of an interpolated momentum as the update.

Chen et al., "Symbolic discovery of optimization algorithms", algorithm 2 (page 4), with the weight
decay applied before the step, as DeepSpeed's kernels do.
"""

from __future__ import annotations

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
class Lion:
    """Evolved sign momentum.

    Hyperparameters: ``lr``, ``betas``, ``weight_decay``. State: ``exp_avg``.

    Args:
        deepspeed_exact: move a weight whose interpolated momentum is exactly 0 by ``-lr``, as
            DeepSpeed's kernels do (they copy the sign bit), instead of leaving it alone. An unused
            embedding row drifts by ``lr`` a step that way.
    """

    name: str = "Lion"
    deepspeed_exact: bool = False

    @property
    def per_tensor(self) -> bool:
        """False: elementwise."""
        return False

    @property
    def defaults(self) -> dict[str, Any]:
        """The paper's: a rate of 1e-4 and betas of 0.9 and 0.99."""
        return {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}

    def states(self, hyper: Hyper) -> tuple[StateSpec, ...]:
        """The momentum."""
        return (StateSpec("exp_avg"),)

    def check(self, hyper: Hyper) -> None:
        """Raise `ConfigError` for a negative rate or decay, or a beta outside [0, 1)."""
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
        rate = float(hyper["lr"])
        beta1, beta2 = (float(beta) for beta in hyper["betas"])
        keep = 1 - rate * float(hyper["weight_decay"])

        def kernel(weights: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
            for weight, grad, exp_avg in zip(weights, grads, states[0], strict=True):
                update = (exp_avg * beta1).add_(grad, alpha=1 - beta1)
                if self.deepspeed_exact:
                    update = torch.copysign(torch.ones_like(update), update)
                else:
                    update.sign_()
                weight.mul_(keep).add_(update, alpha=-rate)
                exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)

        def kernel_of(run: Run) -> Kernel:
            return kernel

        update_runs(
            runs,
            ["exp_avg"],
            kernel_of,
            grad_scale=grad_scale,
            scale_in_grad_dtype=scale_in_grad_dtype,
            scratch=scratch,
            fused=False,
        )
