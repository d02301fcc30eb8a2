"""`deepspeed.ops.lion`: Lion under DeepSpeed's names, arguments and defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from patrickstar.optim.lion import Lion
from patrickstar.optim.rule_optimizer import RuleOptimizer

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class DeepSpeedCPULion(RuleOptimizer):
    """Lion; its momentum is fp32."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, Lion(), lr=lr, betas=tuple(betas), weight_decay=weight_decay)


class FusedLion(DeepSpeedCPULion):
    """The same under the name and with the arguments of DeepSpeed's GPU optimizer."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)
