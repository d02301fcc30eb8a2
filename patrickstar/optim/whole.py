"""Rules that look at whole tensors: one call per tensor, with its scaled gradient in its shape.

Such a rule needs a norm or a matrix product over the tensor, so a run must hold all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from patrickstar.errors import ConfigError
from patrickstar.optim.update import GradScale, Run, Scratch
from patrickstar.optim.walk import Scaling

TensorUpdate = Callable[[Tensor, Tensor, dict[str, Tensor], int], None]
"""``update(weight, grad, state, step)``, all in the shape of the tensor; in place.

`grad` may be overwritten.
"""


def update_tensors(
    rule: str,
    runs: Sequence[Run],
    states: Sequence[str],
    update: TensorUpdate,
    *,
    grad_scale: GradScale,
    scale_in_grad_dtype: bool,
    scratch: Scratch | None,
) -> None:
    """Call `update` for every tensor of the runs, then cast masters into parameters.

    The gradient of one tensor is held in the dtype of its weight, in the scratch.

    Raises:
        ConfigError: a run holds only a piece of a tensor.
    """
    scratch = Scratch() if scratch is None else scratch
    scaling = Scaling.of(grad_scale, scale_in_grad_dtype)
    with torch.no_grad():
        for run in runs:
            run.check()
            weight = run.weight
            for seg in run.segments:
                if not seg.whole:
                    raise ConfigError(
                        f"optimizer {rule} needs whole tensors, but one of shape {seg.shape} is "
                        f"cut over chunks; use a chunk_size of at least {seg.tensor_numel} "
                        "elements or an elementwise optimizer"
                    )
                part = slice(seg.start, seg.stop)
                grad = scaling.load(run.grad[part], weight.dtype, scratch)
                if grad.data_ptr() == run.grad[part].data_ptr():
                    grad = scratch.buffer(seg.numel, grad.dtype, grad.device).copy_(grad)
                update(
                    weight[part].view(seg.shape),
                    grad.view(seg.shape),
                    {name: run.state[name][part].view(seg.shape) for name in states},
                    run.step,
                )
                if run.master is not None:
                    run.param[part].copy_(weight[part])
