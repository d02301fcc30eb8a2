"""One pass over memory: walk a run in blocks that stay in cache, keeping PyTorch's bits.

Per block of a mixed run: widen the gradient into a reused fp32 buffer, scale it there, call the
kernel on the block of master weights and moments, cast the master into the 16-bit parameter. With
nothing to widen or to scale, the kernel is called once on the whole run.

Bits: see `patrickstar.optim.layout`. Blocks are whole SIMD vectors, so inside a run every element
takes the vector path. The elements that PyTorch would treat as a tail are gathered before the walk,
updated by scalar code in a call of their own, and put back over what the walk left there. Elements
left over at the end of a run that are *not* a tail go through the kernel in a padded vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from patrickstar.optim.lanes import fused_lanes
from patrickstar.optim.layout import Layout, Segment
from patrickstar.optim.update import GradScale, Run, Scratch

Kernel = Callable[[list[Tensor], list[Tensor], list[list[Tensor]]], None]
"""``kernel(weights, grads, states)``: updates equally long lists of flat tensors in place.

``states[k][i]`` is the k-th state of ``weights[i]``. `grads` has the dtype of `weights`.
"""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Factors for the gradient, those that change nothing left out."""

    factors: tuple[float | Tensor, ...]
    in_grad_dtype: bool

    @classmethod
    def of(cls, grad_scale: GradScale, in_grad_dtype: bool) -> Scaling:
        """Normalise what a caller gave. A factor of 1 is dropped: x * 1 has the bits of x."""
        factors = grad_scale if isinstance(grad_scale, Sequence) else (grad_scale,)
        return cls(tuple(f for f in factors if not _is_one(f)), in_grad_dtype)

    def load(self, grad: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
        """The scaled gradient in `dtype`; `grad` itself if there is nothing to do.

        The result is valid until the next call with the same scratch.
        """
        if not self.factors and grad.dtype == dtype:
            return grad
        narrow = self.in_grad_dtype and bool(self.factors) and grad.dtype != dtype
        # Copying a block and multiplying it in cache is faster than multiplying out of memory: two
        # and a half times in 16 bits.
        first = grad.dtype if narrow else dtype
        scaled = scratch.buffer(grad.numel(), first, grad.device).copy_(grad)
        for factor in self.factors:
            scaled.mul_(factor)
        if narrow:
            return scratch.buffer(grad.numel(), dtype, grad.device).copy_(scaled)
        return scaled


def _is_one(factor: float | Tensor) -> bool:
    # Reading a tensor that lives on an accelerator would wait for it.
    if isinstance(factor, Tensor) and factor.device.type != "cpu":
        return False
    return float(factor) == 1.0


def update_runs(
    runs: Sequence[Run],
    states: Sequence[str],
    kernel_of: Callable[[Run], Kernel],
    *,
    grad_scale: GradScale,
    scale_in_grad_dtype: bool,
    scratch: Scratch | None,
    fused: bool,
) -> None:
    """Update runs in place with an elementwise kernel each.

    Args:
        runs: the flat ranges.
        states: names of the state tensors, in the order the kernel wants them.
        kernel_of: makes the kernel for a run (for its step count and device).
        grad_scale: see `UpdateRule.apply`.
        scale_in_grad_dtype: see `UpdateRule.apply`.
        scratch: see `UpdateRule.apply`.
        fused: whether the kernel is one of PyTorch's fused ones: it makes one pass and allocates
            nothing, so it may be given a whole run, and on a CPU its scalar tail has other bits.
            Other kernels are built of elementwise operators with temporaries: they are given blocks
            and have no tail to mind.
    """
    scratch = Scratch() if scratch is None else scratch
    scaling = Scaling.of(grad_scale, scale_in_grad_dtype)
    with torch.no_grad():
        for run in runs:
            run.check()
            weight = run.weight
            lanes = fused_lanes(weight.dtype) if fused and weight.device.type == "cpu" else 1
            held = [run.state[name] for name in states]
            _update_run(run, held, kernel_of(run), scaling, scratch, lanes, fused)


def _update_run(
    run: Run,
    states: Sequence[Tensor],
    kernel: Kernel,
    scaling: Scaling,
    scratch: Scratch,
    lanes: int,
    at_once: bool,
) -> None:
    weight = run.weight
    numel = weight.numel()
    native, tails = True, None
    if lanes > 1:
        layout = run.layout or Layout((Segment(0, (numel,)),))
        native, tails = layout.tails(numel, lanes)
    held = None
    if tails is not None:
        held = _gather(run, states, tails.index, scaling, scratch)

    end = numel if native else numel - numel % lanes
    block = scratch.block_for(weight.device)
    nothing_to_load = run.grad.dtype == weight.dtype and not scaling.factors
    if end and at_once and nothing_to_load and run.master is None:
        block = end
    if end:
        # Slicing costs as much as a small kernel, so all views are made at once.
        flats = [weight, run.grad, run.param, *states]
        views = [torch.split(flat if end == numel else flat[:end], block) for flat in flats]
        for part, grad, param, *held_parts in zip(*views, strict=True):
            kernel([part], [scaling.load(grad, weight.dtype, scratch)], [[s] for s in held_parts])
            if run.master is not None:
                param.copy_(part)

    if end < numel:
        index = torch.arange(end, numel)
        rest = _gather(run, states, index, scaling, scratch)
        padded = [torch.nn.functional.pad(t, (0, lanes - t.numel())) for t in rest]
        kernel([padded[0]], [padded[1]], [[t] for t in padded[2:]])
        _scatter(run, states, index, [t[: numel - end] for t in padded])
    if tails is not None:
        assert held is not None
        split = [torch.split(t, list(tails.lengths)) for t in held]
        kernel(list(split[0]), list(split[1]), [list(part) for part in split[2:]])
        _scatter(run, states, tails.index, held)


def _gather(
    run: Run, states: Sequence[Tensor], index: Tensor, scaling: Scaling, scratch: Scratch
) -> list[Tensor]:
    weight = run.weight
    index = index.to(weight.device)
    grad = scaling.load(run.grad[index], weight.dtype, scratch).clone()
    return [weight[index], grad, *(state[index] for state in states)]


def _scatter(run: Run, states: Sequence[Tensor], index: Tensor, held: list[Tensor]) -> None:
    weight = run.weight
    index = index.to(weight.device)
    weight[index] = held[0]
    for state, values in zip(states, held[2:], strict=True):
        state[index] = values
    if run.master is not None:
        run.param[index] = held[0].to(run.param.dtype)
