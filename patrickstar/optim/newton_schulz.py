"""Orthogonalisation of matrices by Newton-Schulz iteration, as Muon uses it.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks"
(https://kellerjordan.github.io/posts/muon/): the quintic iteration with coefficients (3.4445,
-4.7750, 2.0315), which brings singular values near 1, not to it. The Gram form iterates on the
small square matrix ``X X^T`` (https://tridao.me/blog/2026/gram-newton-schulz/), with a restart at
the third step. Both as in ``deepspeed/runtime/zero/muon/original_muon.py`` (0.19.8).
"""

from __future__ import annotations

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
_RESTART = 2


def orthogonalize(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Standard iteration in `dtype`.

    Args:
        matrix: shape ``[..., m, n]``; leading dimensions are a batch.
        steps: iterations.
        dtype: of the products; also of the result.
    """
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.to(dtype)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = _iterate(x, steps)
    return x.mT if tall else x


def orthogonalize_gram(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Gram iteration in `dtype`; the standard one for square matrices.

    Args:
        matrix: shape ``[..., m, n]``; leading dimensions are a batch.
        steps: iterations, not 0.
        dtype: of the products; also of the result. The norm is taken before the cast.
    """
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.float() if matrix.dtype == torch.float16 else matrix
    x = x.mT if tall else x
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    if x.size(-1) <= x.size(-2):
        x = _iterate(x, steps)
        return x.mT if tall else x
    gram = x @ x.mT
    product: Tensor | None = None
    for step in range(steps):
        if step == _RESTART and product is not None:
            x = product @ x
            gram = x @ x.mT
            product = None
        z = _B * gram + _C * gram @ gram
        if product is None:
            product = z.clone()
            product.diagonal(dim1=-2, dim2=-1).add_(_A)
        else:
            product = _A * product + z @ product
        if step < steps - 1 and step + 1 != _RESTART:
            rz = _A * gram + z @ gram
            gram = _A * rz + z @ rz
    assert product is not None, "at least one step"
    result: Tensor = x.mT @ product.mT if tall else product @ x
    return result


def _iterate(x: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x
