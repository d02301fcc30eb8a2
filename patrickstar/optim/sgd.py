"""SGD with momentum, with the bits of ``torch.optim.SGD(fused=True)``.

Sutskever et al., "On the importance of initialization and momentum in deep learning". The bits of
``torch.optim.SGD`` in its default form (a loop over elementwise operators) are those of
`patrickstar.optim.torch_rule.TorchRule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patrickstar.optim.update import GradScale, Hyper, Run, Scratch, StateSpec, require
from patrickstar.optim.walk import Kernel, update_runs


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent.

    Hyperparameters as in `torch.optim.SGD`: ``lr``, ``momentum``, ``dampening``, ``weight_decay``
    (L2), ``nesterov``, ``maximize``. State: ``momentum_buffer`` if momentum is not 0; the first
    update sets it to the gradient.
    """

    name: str = "SGD"

    @property
    def per_tensor(self) -> bool:
        """False: elementwise."""
        return False

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of `torch.optim.SGD`."""
        return {
            "lr": 1e-3,
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
            "maximize": False,
        }

    def states(self, hyper: Hyper) -> tuple[StateSpec, ...]:
        """The momentum buffer, if there is momentum."""
        return (StateSpec("momentum_buffer"),) if hyper["momentum"] else ()

    def check(self, hyper: Hyper) -> None:
        """Raise `ConfigError` for negative values, or Nesterov without momentum."""
        for key in ("lr", "momentum", "weight_decay"):
            require(float(hyper[key]) >= 0.0, self.name, key, hyper[key], "a number >= 0")
        if hyper.get("nesterov", False):
            good = hyper["momentum"] > 0 and hyper["dampening"] == 0
            require(good, self.name, "nesterov", True, "it only with momentum > 0 and dampening 0")

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

        def kernel_of(run: Run) -> Kernel:
            def kernel(
                weights: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]
            ) -> None:
                torch._fused_sgd_(
                    weights,
                    grads,
                    states[0] if states else [],
                    weight_decay=float(hyper["weight_decay"]),
                    momentum=float(hyper["momentum"]),
                    lr=float(hyper["lr"]),
                    dampening=float(hyper["dampening"]),
                    nesterov=bool(hyper["nesterov"]),
                    maximize=bool(hyper["maximize"]),
                    is_first_step=bool(states) and run.step == 1,
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
