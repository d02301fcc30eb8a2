"""What an update rule is: flat tensors in, the same tensors changed in place.

A chunk of parameters, the chunk of fp32 master weights, the chunks of moments and the chunk of
gradients are aligned index by index, so an optimizer step is arithmetic on flat ranges. A `Run` is
one such range. A rule knows the names and first values of its state tensors and how to update
runs; it holds no tensors, so one rule object serves any number of parameters and threads.

One pass over memory: unscale and clip the gradient, update master weights and moments, cast the
master back to the 16-bit parameter, block by block, so that a block stays in the processor's cache
(`patrickstar.optim.walk`).

Hyperparameters are a parameter group: the plain dict that `torch.optim.Optimizer` and every
learning-rate scheduler work on. `UpdateRule.defaults` has every key a rule reads.

Scaling the gradient. `grad_scale` is one factor or a sequence of factors, applied one after the
other, each with its own rounding, since that is what an ordinary loop does (unscale, then clip).
`scale_in_grad_dtype` says in which precision:

* False: the gradient is first widened to fp32, then scaled. The bits of a loop that copies 16-bit
  gradients into fp32 ``master.grad`` and clips those.
* True: scaled in its own dtype, then widened. The bits of a loop that clips bf16 ``p.grad`` and
  widens afterwards.

For fp32 gradients both are the same. The gradient tensors themselves are never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from patrickstar.errors import ConfigError
from patrickstar.optim.layout import Layout, Segment

Hyper = Mapping[str, Any]
"""A parameter group: hyperparameter name to value, as in `torch.optim.Optimizer.param_groups`."""

GradScale = float | Tensor | Sequence[float | Tensor]
"""Factor(s) for the gradient; a tensor has no dimensions and keeps its own dtype."""


@dataclass(slots=True)
class Run:
    """A contiguous range of a chunk, of parameters with one step count and one parameter group.

    Attributes:
        param: the parameters, flat, 16-bit or fp32; written.
        grad: the gradients, flat, same numel, 16-bit or fp32; read only.
        master: fp32 master weights, flat, same numel; None if `param` itself is updated.
        state: state name to flat tensor of the same numel, in the dtype of what is updated.
        step: number of this update for these parameters; the first is 1.
        layout: where the tensors lie in the run; None means that it holds one whole flat tensor.
    """

    param: Tensor
    grad: Tensor
    master: Tensor | None
    state: dict[str, Tensor]
    step: int
    layout: Layout | None = None

    @property
    def weight(self) -> Tensor:
        """The tensor that the update is computed on: the master if there is one."""
        return self.param if self.master is None else self.master

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The tensors in the run."""
        if self.layout is None:
            return (Segment(0, (self.param.numel(),)),)
        return self.layout.segments

    def check(self) -> None:
        """Assert what the engine promises: flat, equally long, dtypes that fit."""
        numel = self.param.numel()
        for tensor in (self.grad, self.weight, *self.state.values()):
            assert tensor.dim() == 1 and tensor.numel() == numel, (tensor.shape, numel)
            assert tensor.is_contiguous()
        assert self.master is None or self.master.dtype == torch.float32
        assert self.step >= 1, self.step
        assert self.layout is None or self.layout.numel <= numel


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state tensor of a rule: its name and the value every element starts with."""

    name: str
    init: float = 0.0


@dataclass(slots=True)
class Scratch:
    """Buffers that a thread reuses from block to block and step to step.

    Give each thread that calls `UpdateRule.apply` its own. Holds at most ``block * 6`` bytes for
    elementwise rules (4 for the widened gradient, 2 for scaling in 16 bits).

    Args:
        block: elements per block, a multiple of 64; 0 picks one for the device: 131,072 on a
            CPU (gradient, master and moments of a block are 2 MiB and stay in the caches of two
            cores; measured best of 32 Ki to 512 Ki), eight million elsewhere (few launches).
    """

    block: int = 0
    _buffers: dict[tuple[torch.device, torch.dtype], Tensor] = field(
        default_factory=dict, repr=False
    )

    def __post_init__(self) -> None:
        assert self.block % 64 == 0, "a block must be whole SIMD vectors"

    def block_for(self, device: torch.device) -> int:
        """Elements per block on `device`."""
        if self.block:
            return self.block
        return 1 << 17 if device.type == "cpu" else 1 << 23

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor of `numel` elements, valid until the next call with the same dtype."""
        held = self._buffers.get((device, dtype))
        if held is None or held.numel() < numel:
            held = torch.empty(numel, dtype=dtype, device=device)
            self._buffers[device, dtype] = held
        return held[:numel]

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def release(self) -> None:
        """Give the buffers back."""
        self._buffers.clear()


@runtime_checkable
class UpdateRule(Protocol):
    """An optimizer's formula on flat tensors."""

    @property
    def name(self) -> str:
        """The name users write in a config, such as ``"AdamW"``."""
        ...

    @property
    def defaults(self) -> dict[str, Any]:
        """Every hyperparameter the rule reads, with its default; a new dict each time."""
        ...

    @property
    def per_tensor(self) -> bool:
        """Whether runs must hold whole tensors, because the rule uses their norm or shape."""
        ...

    def states(self, hyper: Hyper) -> tuple[StateSpec, ...]:
        """The state tensors needed under these hyperparameters."""
        ...

    def check(self, hyper: Hyper) -> None:
        """Raise `ConfigError` if a hyperparameter is out of range."""
        ...

    def apply(
        self,
        runs: Sequence[Run],
        hyper: Hyper,
        *,
        grad_scale: GradScale = 1.0,
        scale_in_grad_dtype: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        """Update the runs in place.

        Args:
            runs: flat ranges; all of one parameter group.
            hyper: the parameter group.
            grad_scale: factor(s) for the gradient; see the module's docstring.
            scale_in_grad_dtype: scale before widening the gradient.
            scratch: reused buffers; made for this call if None.
        """
        ...


def check_adam_like(rule: str, hyper: Hyper) -> None:
    """Check ``lr``, ``weight_decay``, ``betas`` and, if there is one, ``eps``."""
    for key in ("lr", "weight_decay", "eps"):
        if key in hyper:
            require(float(hyper[key]) >= 0.0, rule, key, hyper[key], "a number >= 0")
    betas = hyper["betas"]
    good = len(betas) == 2 and all(0.0 <= float(beta) < 1.0 for beta in betas)
    require(good, rule, "betas", betas, "two numbers in [0, 1)")


def require(ok: bool, rule: str, key: str, value: object, expected: str) -> None:
    """Raise a `ConfigError` that names the optimizer, the hyperparameter and what is expected."""
    if not ok:
        raise ConfigError(f"optimizer {rule}: {key}={value!r} is out of range, use {expected}")
