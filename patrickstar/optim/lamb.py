"""LAMB: Adam steps whose length follows the norm of each tensor.

You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", algorithm 2,
in the form of DeepSpeed's FusedLamb: the trust ratio ``|w| / |update|`` is limited to
[`min_coeff`, `max_coeff`], and bias correction goes into the step size.
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
    require,
)
from patrickstar.optim.whole import update_tensors


@dataclass(frozen=True, slots=True)
class Lamb:
    """Layer-wise adaptive moments.

    Hyperparameters: ``lr``, ``betas``, ``eps``, ``eps_inside_sqrt``, ``weight_decay``,
    ``bias_correction``, ``max_coeff``, ``min_coeff``. States: ``exp_avg``, ``exp_avg_sq``.
    """

    name: str = "Lamb"

    @property
    def per_tensor(self) -> bool:
        """True: uses norms of whole tensors."""
        return True

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of DeepSpeed's FusedLamb."""
        return {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "eps_inside_sqrt": False,
            "weight_decay": 0.0,
            "bias_correction": True,
            "max_coeff": 10.0,
            "min_coeff": 0.01,
        }

    def states(self, hyper: Hyper) -> tuple[StateSpec, ...]:
        """Both moments."""
        return (StateSpec("exp_avg"), StateSpec("exp_avg_sq"))

    def check(self, hyper: Hyper) -> None:
        """Raise `ConfigError` for what Adam refuses, or limits that exclude every trust ratio."""
        check_adam_like(self.name, hyper)
        low, high = hyper["min_coeff"], hyper["max_coeff"]
        require(0 <= low <= high, self.name, "min_coeff", low, f"a number from 0 to {high}")

    def apply(
        self,
        runs: Sequence[Run],
        hyper: Hyper,
        *,
        grad_scale: GradScale = 1.0,
        scale_in_grad_dtype: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        """Update the runs in place; see `UpdateRule.apply`. Makes two tensors of a weight's size.

        Raises:
            ConfigError: a run holds only a piece of a tensor.
        """
        rate, eps, decay = (float(hyper[key]) for key in ("lr", "eps", "weight_decay"))
        beta1, beta2 = (float(beta) for beta in hyper["betas"])

        def update(weight: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
            exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
            exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
            exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            if hyper["eps_inside_sqrt"]:
                denominator = (exp_avg_sq + eps).sqrt_()
            else:
                denominator = exp_avg_sq.sqrt().add_(eps)
            change = torch.div(exp_avg, denominator, out=denominator)
            if decay:
                change.add_(weight, alpha=decay)
            length = rate
            if hyper["bias_correction"]:
                length *= math.sqrt(1 - beta2**step) / (1 - beta1**step)
            ratio = trust_ratio(weight, change, hyper["min_coeff"], hyper["max_coeff"])
            weight.sub_(change.mul_(ratio * length))

        update_tensors(
            self.name,
            runs,
            ["exp_avg", "exp_avg_sq"],
            update,
            grad_scale=grad_scale,
            scale_in_grad_dtype=scale_in_grad_dtype,
            scratch=scratch,
        )


def trust_ratio(weight: Tensor, change: Tensor, least: float, most: float) -> Tensor:
    """``|weight| / |change|`` within limits, 1 if either norm is 0; a tensor without dimensions."""
    weight_norm = torch.linalg.vector_norm(weight)
    change_norm = torch.linalg.vector_norm(change)
    ratio = torch.clamp(weight_norm / change_norm, least, most)
    usable = (weight_norm != 0) & (change_norm != 0)
    return torch.where(usable, ratio, torch.ones_like(ratio))
