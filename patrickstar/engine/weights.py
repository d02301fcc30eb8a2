"""Full weights out of the chunks and back into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from patrickstar.engine.construct import view_of
from patrickstar.engine.parameter import ManagedParameter
from patrickstar.engine.pieces import PiecedParameter
from patrickstar.engine.state import ModelState
from patrickstar.memory import Access, Use

_PLAIN = torch._C.DisableTorchFunctionSubclass


def gather_state_dict(
    module: nn.Module, state: ModelState, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """`module.state_dict()` with every managed parameter copied to memory of its own.

    Tied parameters stay one tensor. Chunks are visited one at a time.
    """
    kwargs["keep_vars"] = True
    found: dict[str, Any] = module.state_dict(*args, **kwargs)
    copies: dict[int, torch.Tensor] = {}
    for name, value in found.items():
        if type(value) in (ManagedParameter, PiecedParameter):
            if id(value) not in copies:
                copies[id(value)] = _copy_out(state, value)
            found[name] = copies[id(value)]
        elif isinstance(value, torch.Tensor):
            found[name] = value.detach()
    return found


def _copy_out(state: ModelState, parameter: nn.Parameter) -> torch.Tensor:
    if isinstance(parameter, PiecedParameter):
        copy = torch.empty(parameter.shape, dtype=parameter.dtype)
        for start, stop, piece in parameter.rows():
            copy[start:stop] = _copy_out(state, piece)
        return copy
    aligned, _ = state.of(parameter)
    with state.manager.use([Use(aligned.parameter.id, Access.READ)]):
        with _PLAIN(), torch.no_grad():
            return parameter.detach().clone()


def load_state_dict(
    module: nn.Module, state: ModelState, weights: Mapping[str, Any], *, strict: bool
) -> Any:
    """`module.load_state_dict(weights)`, with master weights in the precision of `weights`."""
    result = module.load_state_dict(weights, strict=strict)
    loaded: set[int] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = weights.get(name)
        if value is None or id(parameter) in loaded:
            continue
        loaded.add(id(parameter))
        if isinstance(parameter, PiecedParameter):
            for start, stop, piece in parameter.rows():
                _load_master(state, piece, value[start:stop])
        elif type(parameter) is ManagedParameter:
            _load_master(state, parameter, value)
    return result


def _load_master(state: ModelState, parameter: nn.Parameter, value: torch.Tensor) -> None:
    aligned, slot = state.of(parameter)
    if aligned.master is None:
        return
    tier = state.update_tier
    with state.manager.use([Use(aligned.master.id, Access.UPDATE, tier)]):
        flat = state.manager.tensor(aligned.master, tier)
        with torch.no_grad():
            view_of(flat, slot.offset, slot.shape, slot.stride).copy_(value)
