"""Rates of processor and memory, each the best of several tries: a limit is what is possible.

Matrix products have the shapes that a GPT of width 1024 makes of 512 tokens. The update is the one
that training makes: AdamW on fp32 masters, with 16-bit gradients and weights, in one pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from patrickstar.optim import Run, Scratch, rule_named

SHAPES = ((512, 1024, 4096), (512, 4096, 1024), (512, 1024, 3072), (2048, 2048, 2048))
_UPDATE_BYTES = 28  # a weight: gradient in, weight out, master and two moments in and out


def seconds_of(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def gemm_rate(
    dtype: torch.dtype = torch.bfloat16,
    repeats: int = 12,
    shapes: tuple[tuple[int, int, int], ...] = SHAPES,
) -> float:
    """Multiplications and additions a second in products of `dtype`, the best of all `shapes`.

    Args:
        shapes: rows, inner and columns of each product.
    """
    best = 0.0
    for rows, inner, columns in shapes:
        left = torch.randn(rows, inner).to(dtype)
        right = torch.randn(columns, inner).to(dtype)  # a linear layer's weight
        out = torch.empty(rows, columns, dtype=dtype)
        for _ in range(repeats):
            took = seconds_of(partial(torch.mm, left, right.t(), out=out))
            best = max(best, 2 * rows * inner * columns / took)
    return best


def copy_rate(nbytes: int = 256 << 20, repeats: int = 8) -> float:
    """Bytes a second that a copy reads and writes, together."""
    source = torch.ones(nbytes // 4)
    target = torch.empty_like(source).fill_(0)
    return max(2 * nbytes / seconds_of(lambda: target.copy_(source)) for _ in range(repeats))


def update_rate(numel: int = 16 << 20, repeats: int = 4) -> float:
    """Bytes a second that updates of `numel` bf16 weights with fp32 masters read and write."""
    rule, hyper = rule_named("AdamW", {})
    run = Run(
        torch.zeros(numel, dtype=torch.bfloat16),
        torch.full((numel,), 1e-3, dtype=torch.bfloat16),
        torch.zeros(numel),
        {state.name: torch.zeros(numel) for state in rule.states(hyper)},
        step=1,
    )
    scratch = Scratch()
    update = partial(rule.apply, [run], hyper, grad_scale=0.5, scratch=scratch)
    return max(_UPDATE_BYTES * numel / seconds_of(update) for _ in range(repeats))
