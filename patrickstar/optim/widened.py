"""Gradients in fp32 for a moment, in memory that is kept from one to the next.

The norm of a 16-bit gradient is taken of an fp32 copy. A fresh copy of every gradient is the
largest temporary of a backward: the C library's heap finds it a place with pages that nobody has
touched yet, which costs more than the norm. One buffer serves them all, but for those that are so
large that holding it would cost chunks their place.
"""

from __future__ import annotations

import torch

_LARGEST = 4 << 20  # elements; what is larger is copied anew each time


class Widened:
    """Copies in fp32, each good until the next one is asked for.

    Holds at most 16 MiB, until `release`, which the end of a backward calls for.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` if it is in fp32, or an fp32 copy of the same shape and strides."""
        if tensor.dtype is torch.float32:
            return tensor
        numel = tensor.numel()
        if numel > _LARGEST or not tensor.is_contiguous():
            return tensor.float()
        buffer = self._buffer
        if buffer is None or buffer.numel() < numel or buffer.device != tensor.device:
            self._buffer = None  # first, so that both need not be there at once
            buffer = self._buffer = tensor.new_empty(numel, dtype=torch.float32)
        return buffer[:numel].view(tensor.shape).copy_(tensor)

    def release(self) -> None:
        """Give the memory back."""
        self._buffer = None
