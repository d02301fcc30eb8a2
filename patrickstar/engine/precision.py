"""The precision of a run: what is cast, and how losses are scaled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from patrickstar.optim import LossScale

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """What a run of the precision `name` casts.

    Args:
        name: "fp32", "bf16" or "fp16".
        scaler: scales losses; None leaves them.
        cast: whether inputs of the model are cast.
        autocast: what `torch.autocast` computes in; None computes in the dtype of the weights.
    """

    def __init__(
        self,
        name: str,
        scaler: LossScale | None = None,
        *,
        cast: bool = True,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.autocast = autocast
        self.name, self._cast = name, cast
        self.dtype = _DTYPES[name]
        self.scaler = scaler

    @property
    def low(self) -> bool:
        """Whether parameters have 16 bits and need master weights."""
        return self.dtype is not torch.float32

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.loss_scale

    def computing(self, device: torch.device) -> AbstractContextManager[Any]:
        """Around a forward on `device`."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, self.autocast)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else loss.float() * self.loss_scale

    def cast_inputs(self, inputs: Any) -> Any:
        """Floating-point tensors in the training precision, everything else as it is."""
        if not (self.low and self._cast):
            return inputs

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

        return tree_map_only(torch.Tensor, cast, inputs)

    def cast_buffers(self, module: nn.Module) -> None:
        """Cast the running statistics of norm layers, whose kernels want one dtype.

        Other buffers keep theirs, as with DeepSpeed: a rotary table in 16 bits is a worse model.
        """
        if not self.low:
            return
        for owner in module.modules():
            if isinstance(owner, nn.modules.batchnorm._NormBase):
                for name, buffer in owner._buffers.items():
                    if buffer is not None and buffer.is_floating_point():
                        owner._buffers[name] = buffer.to(self.dtype)
