"""`deepspeed.ops.adam`: Adam and AdamW under DeepSpeed's names, arguments and defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from patrickstar.optim.adam import Adam, AdamW
from patrickstar.optim.rule_optimizer import RuleOptimizer

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class DeepSpeedCPUAdam(RuleOptimizer):
    """AdamW, or Adam without `adamw_mode`; moments are fp32."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            AdamW() if adamw_mode else Adam(),
            lr=lr,
            bias_correction=bias_correction,
            betas=tuple(betas),
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )


class FusedAdam(DeepSpeedCPUAdam):
    """The same under the name and with the arguments of DeepSpeed's GPU optimizer."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode
        )
