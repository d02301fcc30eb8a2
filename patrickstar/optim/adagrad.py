"""Adagrad, with the bits of ``torch.optim.Adagrad(fused=True)``, which exists on CPUs.

Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic
optimization". Elsewhere it is made of the operators of ``torch.optim.Adagrad``.
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
class Adagrad:
    """Gradient descent with a rate per weight that falls with the squares of its gradients.

    Hyperparameters as in `torch.optim.Adagrad`: ``lr``, ``lr_decay``, ``weight_decay`` (L2),
    ``initial_accumulator_value``, ``eps``, ``maximize``. State: ``sum``.

    Args:
        fused: use PyTorch's fused kernel on CPUs; False gives the bits of ``torch.optim.Adagrad``
            in its default form.
    """

    name: str = "Adagrad"
    fused: bool = True

    @property
    def per_tensor(self) -> bool:
        """False: elementwise."""
        return False

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of `torch.optim.Adagrad`."""
        return {
            "lr": 1e-2,
            "lr_decay": 0.0,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "eps": 1e-10,
            "maximize": False,
        }

    def states(self, hyper: Hyper) -> tuple[StateSpec, ...]:
        """The sum of squares, which starts at ``initial_accumulator_value``."""
        return (StateSpec("sum", float(hyper["initial_accumulator_value"])),)

    def check(self, hyper: Hyper) -> None:
        """Raise `ConfigError` for negative values."""
        for key in ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
            require(float(hyper[key]) >= 0.0, self.name, key, hyper[key], "a number >= 0")

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
        fused = self.fused and all(run.weight.device.type == "cpu" for run in runs)

        def kernel_of(run: Run) -> Kernel:
            return _fused(run, hyper) if fused else _plain(run, hyper)

        update_runs(
            runs,
            ["sum"],
            kernel_of,
            grad_scale=grad_scale,
            scale_in_grad_dtype=scale_in_grad_dtype,
            scratch=scratch,
            fused=fused,
        )


def _fused(run: Run, hyper: Hyper) -> Kernel:
    step = torch.tensor(float(run.step))

    def kernel(weights: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
        torch._fused_adagrad_(
            weights,
            grads,
            states[0],
            [step] * len(weights),
            lr=float(hyper["lr"]),
            lr_decay=float(hyper["lr_decay"]),
            weight_decay=float(hyper["weight_decay"]),
            eps=float(hyper["eps"]),
            maximize=bool(hyper["maximize"]),
        )

    return kernel


def _plain(run: Run, hyper: Hyper) -> Kernel:
    rate = float(hyper["lr"]) / (1 + (run.step - 1) * float(hyper["lr_decay"]))
    decay = float(hyper["weight_decay"])

    def kernel(weights: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
        for weight, given, total in zip(weights, grads, states[0], strict=True):
            grad = -given if hyper["maximize"] else given
            grad = grad.add(weight, alpha=decay) if decay else grad
            total.addcmul_(grad, grad, value=1)
            weight.addcdiv_(grad, total.sqrt().add_(float(hyper["eps"])), value=-rate)

    return kernel
