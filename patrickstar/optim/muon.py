"""Muon for matrices, AdamW for everything else, as DeepSpeed's ``"Muon"``.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks": momentum, then
orthogonalisation of each matrix (`patrickstar.optim.newton_schulz`). DeepSpeed 0.19.8 splits the
parameters by name and shape (`is_muon_parameter`); a parameter group says with ``use_muon`` which
half it is, and has that half's defaults (`Muon.group_defaults`).

The gradient is scaled and clipped first, as in DeepSpeed without ZeRO. (Its ZeRO stages
orthogonalise first and clip the result.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from patrickstar.errors import ConfigError
from patrickstar.optim.adam import AdamW
from patrickstar.optim.newton_schulz import orthogonalize, orthogonalize_gram
from patrickstar.optim.update import GradScale, Hyper, Run, Scratch, StateSpec, require
from patrickstar.optim.whole import update_tensors

_STEPS = 5


def is_muon_parameter(name: str, shape: Sequence[int]) -> bool:
    """Whether DeepSpeed gives this parameter to Muon: a matrix that is no embedding and no head."""
    return len(shape) >= 2 and not any(word in name.lower() for word in ("embed", "lm_head"))


@dataclass(frozen=True, slots=True)
class Muon:
    """Momentum orthogonalised by Newton-Schulz.

    Hyperparameters of a group with ``use_muon``: ``lr``, ``momentum``, ``weight_decay``,
    ``ns_method`` ("gram" or "standard"); its state is ``momentum_buffer``. Of one without: those of
    the auxiliary rule.

    Args:
        aux: updates the groups without ``use_muon``.
        gram_dtype: precision of the Gram iteration; None means fp16, but fp32 on CPUs, which
            multiply fp16 matrices very slowly or not at all.
    """

    name: str = "Muon"
    aux: AdamW = field(default_factory=AdamW)
    gram_dtype: torch.dtype | None = None

    @property
    def per_tensor(self) -> bool:
        """True: works on whole matrices."""
        return True

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of both halves; `use_muon` is True and ``lr`` and ``weight_decay`` Muon's."""
        return self.group_defaults(use_muon=False) | self.group_defaults(use_muon=True)

    def group_defaults(self, *, use_muon: bool) -> dict[str, Any]:
        """DeepSpeed's defaults for a group of one half."""
        if use_muon:
            return {
                "use_muon": True,
                "lr": 0.02,
                "momentum": 0.95,
                "weight_decay": 0.0,
                "ns_method": "gram",
            }
        ours = {"use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10}
        return self.aux.defaults | ours | {"weight_decay": 0.0}

    def states(self, hyper: Hyper) -> tuple[StateSpec, ...]:
        """The momentum buffer, or what the auxiliary rule needs."""
        return (StateSpec("momentum_buffer"),) if hyper["use_muon"] else self.aux.states(hyper)

    def check(self, hyper: Hyper) -> None:
        """Raise `ConfigError` for values out of range."""
        if not hyper["use_muon"]:
            self.aux.check(hyper)
            return
        for key in ("lr", "weight_decay"):
            require(float(hyper[key]) >= 0.0, self.name, key, hyper[key], "a number >= 0")
        momentum, method = hyper["momentum"], hyper["ns_method"]
        require(0 <= momentum < 1, self.name, "momentum", momentum, "a number in [0, 1)")
        known = method in ("gram", "standard")
        require(known, self.name, "ns_method", method, '"gram" or "standard"')

    def apply(
        self,
        runs: Sequence[Run],
        hyper: Hyper,
        *,
        grad_scale: GradScale = 1.0,
        scale_in_grad_dtype: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        """Update the runs in place; see `UpdateRule.apply`. Makes a few tensors of a weight's size.

        Raises:
            ConfigError: a run holds only a piece of a matrix, or a vector is given to Muon.
        """
        if not hyper["use_muon"]:
            self.aux.apply(
                runs,
                hyper,
                grad_scale=grad_scale,
                scale_in_grad_dtype=scale_in_grad_dtype,
                scratch=scratch,
            )
            return
        rate, beta = float(hyper["lr"]), float(hyper["momentum"])
        keep = 1 - rate * float(hyper["weight_decay"])

        def update(weight: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
            if weight.dim() < 2:
                raise ConfigError(
                    f"optimizer Muon updates matrices, but a parameter has shape "
                    f"{tuple(weight.shape)}; put it into a group with use_muon=False"
                )
            momentum = state["momentum_buffer"]
            momentum.lerp_(grad, 1 - beta)
            change = self._orthogonal(grad.lerp_(momentum, beta), str(hyper["ns_method"]))
            weight.mul_(keep).add_(change.to(weight.dtype).view_as(weight), alpha=-rate)

        update_tensors(
            self.name,
            runs,
            ["momentum_buffer"],
            update,
            grad_scale=grad_scale,
            scale_in_grad_dtype=scale_in_grad_dtype,
            scratch=scratch,
        )

    def _orthogonal(self, blend: Tensor, method: str) -> Tensor:
        # Filters of a convolution are the rows of one matrix (DeepSpeed means that too, but fails
        # on them); other leading dimensions are a batch.
        matrix = blend.view(len(blend), -1) if blend.dim() == 4 else blend
        if method == "standard":
            result = orthogonalize(matrix, _STEPS, torch.bfloat16)
        else:
            dtype = self.gram_dtype
            if dtype is None:
                dtype = torch.float32 if blend.device.type == "cpu" else torch.float16
            result = orthogonalize_gram(matrix, _STEPS, dtype)
        rows, columns = matrix.size(-2), matrix.size(-1)
        scale = math.sqrt(rows / columns) if rows > columns else 1.0
        return (result.mul_(scale) if scale != 1.0 else result).contiguous()
