"""`deepspeed.ops.adagrad`: Adagrad under DeepSpeed's name, arguments and defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from patrickstar.optim.adagrad import Adagrad
from patrickstar.optim.rule_optimizer import RuleOptimizer

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(RuleOptimizer):
    """Adagrad; its sum of squares is fp32."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, Adagrad(), lr=lr, eps=eps, weight_decay=weight_decay)
