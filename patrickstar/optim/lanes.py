"""How many elements one SIMD vector of PyTorch's fused CPU kernels holds, found by asking them.

The width depends on the processor, on the instruction set PyTorch was built for and on
``ATEN_CPU_CAPABILITY``. It is measured, not looked up: tensors of 127 random elements are updated
whole (vector path, then a scalar tail) and one element at a time (scalar path only). The first
element from the end whose bits differ lies in the vector part.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_NUMEL = 127
_TENSORS = 48


def fused_lanes(dtype: torch.dtype = torch.float32) -> int:
    """SIMD lanes of the fused CPU kernels for tensors of `dtype`.

    The answer is a fact about the process and is found once (a few milliseconds). The random
    numbers come from a generator of its own, so the global one is left alone.

    Returns:
        a power of two, at least 2.
    """
    # A vector is as many bytes wide for every dtype; fp32 shows the difference most often.
    return _fp32_lanes() * 4 // dtype.itemsize


@functools.cache
def _fp32_lanes() -> int:
    with torch.no_grad():
        tail = min(_scalar_tail(seed) for seed in range(_TENSORS))
    # 127 is 2^7 - 1: with 2^k lanes the tail is 2^k - 1 elements, for every k up to 6.
    # No difference in fp32 (a build without FMA): minding a tail then costs little and harms
    # nothing, and 16-bit tensors still have one, of ATen's 32-byte vectors.
    return 8 if tail == _NUMEL else tail + 1


def _scalar_tail(seed: int) -> int:
    """Elements at the end of a tensor that are not seen to differ from the scalar path."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.rand(_NUMEL, generator=generator) for _ in range(4)]
    whole = [part.clone() for part in parts]
    single = [part.clone() for part in parts]
    _adamw([[part] for part in whole])
    _adamw([list(torch.split(part, 1)) for part in single])
    differs = torch.zeros(_NUMEL, dtype=torch.bool)
    for left, right in zip(whole, single, strict=True):
        differs |= left != right
    found = differs.nonzero()
    return _NUMEL - 1 - int(found[-1]) if len(found) else _NUMEL


def _adamw(tensors: list[list[Tensor]]) -> None:
    weights, grads, exp_avgs, exp_avg_sqs = tensors
    torch._fused_adamw_(
        weights,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [torch.tensor(3.0)] * len(weights),
        amsgrad=False,
        lr=1e-2,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        eps=1e-8,
        maximize=False,
    )
