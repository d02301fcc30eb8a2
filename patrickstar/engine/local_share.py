"""This rank's share of one weight's full-precision values, flat.

DeepSpeed's `safe_get_local_*` return what its stage 3 keeps on a rank, as a flat tensor. At lower
stages, and on one rank, that is the whole. Here a rank keeps a part of every chunk, so its share of
one weight may be all of it, or empty. With several ranks, all of them call these functions.
"""

from __future__ import annotations

import torch
from torch import nn

from patrickstar.engine import full_precision as full


def local_value(parameter: nn.Parameter) -> torch.Tensor | None:
    """As `full_precision.full_value`, this rank's share."""
    return _own(parameter, full.full_value(parameter))


def local_state(parameter: nn.Parameter, name: str) -> torch.Tensor | None:
    """As `full_precision.full_state`, this rank's share."""
    return _own(parameter, full.full_state(parameter, name))


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """As `full_precision.full_gradient`, this rank's share."""
    return _own(parameter, full.full_gradient(parameter))


def set_local_value(parameter: nn.Parameter, value: torch.Tensor) -> None:
    full.set_full_value(parameter, _within(parameter, full.full_value(parameter), value))


def set_local_state(parameter: nn.Parameter, value: torch.Tensor, name: str) -> None:
    whole = _within(parameter, full.full_state(parameter, name), value)
    full.set_full_state(parameter, whole, name)


def set_local_gradient(parameter: nn.Parameter, value: torch.Tensor) -> None:
    full.set_full_gradient(parameter, _within(parameter, full.full_gradient(parameter), value))


def _own(parameter: nn.Parameter, value: torch.Tensor | None) -> torch.Tensor | None:
    if value is None:
        return None
    share = full.share_of(parameter)
    return value.flatten() if share is None else value.flatten()[share]


def _within(
    parameter: nn.Parameter, whole: torch.Tensor | None, share: torch.Tensor
) -> torch.Tensor:
    """The whole value with this rank's share replaced; what it says of the rest is not kept."""
    own = full.share_of(parameter)
    if own is None or whole is None:
        return share.reshape(parameter.shape)
    flat = whole.flatten()
    flat[own] = share.to(flat.dtype).flatten()
    return flat.reshape(parameter.shape)
