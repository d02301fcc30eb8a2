"""Global gradient norm and clipping, exact: no result depends on chunking or on order of arrival.

Tensors come as their chunks come. `GradNorm` keeps one number per tensor under the tensor's place
in the fixed parameter order; only `GradNorm.total` combines them, in that order.

Two arithmetics:

* ``"torch"``: the bits of `torch.nn.utils.clip_grad_norm_`. Per tensor the 2-norm in the dtype of
  the gradient, then the 2-norm of the stacked norms; the gradients are multiplied by
  ``clamp(max_norm / (norm + 1e-6), max=1)``.
* ``"deepspeed"``: DeepSpeed's ZeRO optimizers. Per tensor the 2-norm in float64, squares added in
  float64 within a parameter group, the group's norm rounded to fp32 (stages 1 and 2) or kept in
  float64 (stage 3), then the 2-norm over groups; the gradients are multiplied by ``1 / (scale *
  max(1, (norm / scale + 1e-6) / clip))``, where ``norm`` is that of the still scaled gradients
  (`get_grad_norm_direct`, `combine_grad_norm_groups`, `unscale_and_clip_grads` in DeepSpeed).

A tensor cut over several chunks (`GradNorm.add_piece`) cannot have PyTorch's fp32 bits, because
they hang on one sequential sum over the whole tensor. Its norm is computed from float64 sums over
canonical blocks of the tensor, added exactly (`math.fsum`): the same bits for every way to cut it,
and nearer to the true norm than PyTorch's. Whoever has the whole gradient in hand (it exists in one
piece when autograd makes it) calls `GradNorm.add` and gets PyTorch's bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from patrickstar.errors import ConfigError

Arithmetic = Literal["torch", "deepspeed"]

BLOCK = 1 << 14
"""Elements in a canonical block of a tensor."""

_STRIP = 1 << 18


class BlockSums:
    """Sum of squares of one tensor that arrives in pieces, the same bits for every cutting.

    The tensor is divided into canonical blocks of `BLOCK` elements from its first element. The
    squares of a block are added in float64 by one kernel call over exactly these elements; block
    sums are added with `math.fsum`, whose result is correctly rounded and so knows no order. Parts
    of a block that lie in different pieces wait (at most `BLOCK` elements for each cut) until the
    block is complete.
    """

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._sums: list[float] = []
        self._waiting: dict[int, dict[int, Tensor]] = {}
        self._seen = 0

    def add(self, piece: Tensor, offset: int = 0) -> None:
        """Add elements ``offset : offset + piece.numel()`` of the flattened tensor."""
        assert piece.dim() == 1 and offset >= 0 and offset + piece.numel() <= self._numel
        self._seen += piece.numel()
        stop = offset + piece.numel()
        first = -(-offset // BLOCK) * BLOCK
        last = stop if stop == self._numel else stop // BLOCK * BLOCK
        if first >= last:
            # Nothing but parts of one or two blocks.
            self._wait(piece, offset)
            return
        if offset < first:
            self._wait(piece[: first - offset], offset)
        if last < stop:
            self._wait(piece[last - offset :], last)
        self._complete(piece[first - offset : last - offset])

    @property
    def done(self) -> bool:
        """Whether every element has come."""
        return self._seen == self._numel

    def total(self) -> float:
        """The sum of squares. Infinite or NaN if an element is."""
        assert self.done, f"{self._seen} of {self._numel} elements have come"
        try:
            return math.fsum(self._sums)
        except (OverflowError, ValueError):
            return math.nan if any(math.isnan(s) for s in self._sums) else math.inf

    def _complete(self, blocks: Tensor) -> None:
        # Whole canonical blocks, the last perhaps shorter. Each row is one reduction of its own, so
        # how many rows there are makes no difference. Strips bound the float64 copy.
        for strip in torch.split(blocks, _STRIP):
            rows = strip.numel() // BLOCK
            body = strip[: rows * BLOCK].to(torch.float64).view(rows, BLOCK)
            self._sums.extend(body.square_().sum(dim=1).tolist())
            rest = strip[rows * BLOCK :]
            if rest.numel():
                self._sums.append(float(rest.to(torch.float64).square_().sum()))

    def _wait(self, piece: Tensor, offset: int) -> None:
        while piece.numel():
            block = offset // BLOCK
            size = min(BLOCK, self._numel - block * BLOCK)
            here = min(block * BLOCK + size - offset, piece.numel())
            parts = self._waiting.setdefault(block, {})
            parts[offset] = piece[:here].clone()
            if sum(part.numel() for part in parts.values()) == size:
                self._complete(torch.cat([parts[start] for start in sorted(parts)]))
                del self._waiting[block]
            piece, offset = piece[here:], offset + here


class GradNorm:
    """Accumulates the global 2-norm of gradients that come in any order and any pieces.

    Args:
        arithmetic: ``"torch"`` or ``"deepspeed"``; see the module's docstring.
        dtype: for ``"torch"``: take norms of the gradients converted to this dtype (what a loop
            sees that clips fp32 copies of 16-bit gradients); None means in their own. For
            ``"deepspeed"``: dtype of a group's norm, fp32 for stages 1 and 2, float64 (the default)
            for stage 3.
    """

    def __init__(self, arithmetic: Arithmetic = "torch", dtype: torch.dtype | None = None) -> None:
        self.arithmetic = arithmetic
        self.dtype = dtype
        self._norms: dict[int, Tensor] = {}
        self._pieces: dict[int, tuple[BlockSums, torch.dtype, torch.device]] = {}
        self._groups: dict[int, int] = {}

    def add(self, index: int, grad: Tensor, *, group: int = 0) -> None:
        """Add the whole gradient of the parameter at place `index` of the parameter order.

        Args:
            index: any integer that orders the parameters; each may come once between resets.
            grad: of any shape; a view into a chunk will do. Contiguous, or dense in the memory
                order of its parameter, for PyTorch's bits.
            group: the parameter group; only ``"deepspeed"`` adds up group by group.
        """
        assert index not in self._groups, f"gradient {index} was already added"
        if self.arithmetic == "deepspeed":
            self.add_piece(index, grad.reshape(-1), 0, grad.numel(), group=group)
            return
        with torch.no_grad():
            if self.dtype is not None and grad.dtype != self.dtype:
                grad = grad.to(self.dtype)
            self._norms[index] = torch.linalg.vector_norm(grad)
        self._groups[index] = group

    def add_piece(
        self, index: int, piece: Tensor, offset: int, numel: int, *, group: int = 0
    ) -> None:
        """Add a flat piece of a gradient of `numel` elements, from element `offset` on.

        Every element must come exactly once, in pieces of any size and order.
        """
        assert index not in self._norms, f"gradient {index} was already added whole"
        if index not in self._pieces:
            dtype = piece.dtype if self.dtype is None else self.dtype
            self._pieces[index] = BlockSums(numel), dtype, piece.device
            self._groups[index] = group
        with torch.no_grad():
            self._pieces[index][0].add(piece, offset)

    def squares(self, group: int | None = None) -> float:
        """Sum of squares of all that came (of one group), in float64, in parameter order.

        What ranks that hold different parameters add up before taking the root.
        """
        total = 0.0
        for index in sorted(self._groups):
            if group is None or self._groups[index] == group:
                total += self._square(index)
        return total

    def total(self) -> Tensor:
        """The global norm of all that came, a tensor without dimensions; 0 if nothing came.

        Of the dtype that `torch.nn.utils.clip_grad_norm_` returns, or that of a group's norm for
        ``"deepspeed"``, where it is infinite if anything is infinite or NaN.
        """
        if self.arithmetic == "torch":
            return combine_norms([self._norm(index) for index in sorted(self._groups)])
        dtype = torch.float64 if self.dtype is None else self.dtype
        squares = [self.squares(group) for group in sorted(set(self._groups.values()))]
        if not squares:
            return torch.zeros((), dtype=dtype)
        norms = torch.tensor(squares, dtype=torch.float64).to(dtype).pow(0.5)
        total = torch.linalg.vector_norm(norms)
        return total if bool(torch.isfinite(total)) else torch.full_like(total, math.inf)

    def reset(self) -> None:
        """Forget everything, for the next step."""
        self._norms.clear()
        self._pieces.clear()
        self._groups.clear()

    def _square(self, index: int) -> float:
        if index in self._norms:
            return float(self._norms[index]) ** 2
        sums = self._pieces[index][0].total()
        # DeepSpeed squares the norm again; so the root and its rounding belong to its sum.
        return math.sqrt(sums) ** 2 if self.arithmetic == "deepspeed" else sums

    def _norm(self, index: int) -> Tensor:
        if index in self._norms:
            return self._norms[index]
        sums, dtype, device = self._pieces[index]
        root = torch.tensor(math.sqrt(sums.total()), dtype=torch.float64)
        return root.to(dtype=dtype, device=device)


def combine_norms(norms: Iterable[Tensor]) -> Tensor:
    """The norm of per-tensor norms, with the bits of `torch.nn.utils.get_total_norm`.

    That function takes the norms of one device and dtype together; the order of these groups is
    its own affair, so its grouping is used.
    """
    listed = list(norms)
    if not listed:
        return torch.tensor(0.0)
    first = listed[0].device
    if len({(norm.device, norm.dtype) for norm in listed}) > 1:
        from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

        groups: Any = _group_tensors_by_device_and_dtype([list(listed)])
        listed = [norm for ([group], _) in groups.values() for norm in group]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in listed]))
    return total


def check_max_norm(max_norm: float) -> None:
    """Raise `ConfigError` unless `max_norm` is a positive number."""
    if not max_norm > 0.0:
        raise ConfigError(f"gradient_clipping={max_norm!r} must be greater than 0; 0 turns it off")


def torch_clip_coef(total_norm: Tensor, max_norm: float) -> Tensor:
    """The factor `torch.nn.utils.clip_grads_with_norm_` multiplies gradients by; at most 1."""
    check_max_norm(max_norm)
    # As PyTorch writes it: a number over a tensor is reciprocal and multiply, two roundings.
    coef: Tensor = float(max_norm) / (total_norm + 1e-6)
    return torch.clamp(coef, max=1.0)


def deepspeed_clip_coef(total_norm: Tensor, max_norm: float, loss_scale: float) -> Tensor:
    """The factor DeepSpeed's ZeRO optimizers multiply gradients by: unscale and clip in one.

    Args:
        total_norm: global norm of the gradients as they are, still multiplied by the loss scale; no
            dimensions. The factor is computed in its dtype.
        max_norm: ``gradient_clipping``; 0 or less means that they are only unscaled.
        loss_scale: the scale that the loss was multiplied by.
    """
    if max_norm <= 0.0:
        return torch.tensor(1.0 / loss_scale, dtype=torch.float64)
    clip = ((total_norm / loss_scale) + 1e-6) / max_norm
    combined = torch.clamp(clip, min=1.0) * loss_scale
    return torch.reciprocal(combined)
