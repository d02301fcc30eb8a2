"""This rank's share of one weight's full-precision values: on one rank, all of it, flat.

DeepSpeed's `safe_get_local_*` return what its stage 3 keeps on a rank, as a flat tensor. On one
rank that is the whole.
"""

from __future__ import annotations

import torch
from torch import nn

from patrickstar.engine import full_precision as full


def local_value(parameter: nn.Parameter) -> torch.Tensor | None:
    """As `full_precision.full_value`, flat."""
    return _flat(full.full_value(parameter))


def local_state(parameter: nn.Parameter, name: str) -> torch.Tensor | None:
    """As `full_precision.full_state`, flat."""
    return _flat(full.full_state(parameter, name))


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """As `full_precision.full_gradient`, flat."""
    return _flat(full.full_gradient(parameter))


def set_local_value(parameter: nn.Parameter, value: torch.Tensor) -> None:
    full.set_full_value(parameter, value.reshape(parameter.shape))


def set_local_state(parameter: nn.Parameter, value: torch.Tensor, name: str) -> None:
    full.set_full_state(parameter, value.reshape(parameter.shape), name)


def set_local_gradient(parameter: nn.Parameter, value: torch.Tensor) -> None:
    full.set_full_gradient(parameter, value.reshape(parameter.shape))


def _flat(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.flatten()
