"""`deepspeed.ops.lamb`: LAMB under DeepSpeed's name, arguments and defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from patrickstar.optim.lamb import Lamb
from patrickstar.optim.rule_optimizer import RuleOptimizer

__all__ = ["FusedLamb"]


class FusedLamb(RuleOptimizer):
    """LAMB; `max_grad_norm` belongs to the config as `gradient_clipping`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad or max_grad_norm:
            raise ValueError(
                f"FusedLamb: amsgrad={amsgrad!r} and max_grad_norm={max_grad_norm!r} are not "
                "available; leave amsgrad out, and clip with the config's gradient_clipping"
            )
        super().__init__(
            params,
            Lamb(),
            lr=lr,
            bias_correction=bias_correction,
            betas=tuple(betas),
            eps=eps,
            eps_inside_sqrt=eps_inside_sqrt,
            weight_decay=weight_decay,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
        )
