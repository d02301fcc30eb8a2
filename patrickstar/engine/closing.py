"""Handing the parameters back when a run is over.

What was trained belongs to the user's module. When the engine closes, everything else has no use
any more, so parameters that fit the compute tier's budget become ordinary ones there, and the
module goes on without the engine. Parameters that do not fit are left without data.
"""

from __future__ import annotations

import torch
from torch import nn

from patrickstar.engine.parameter import ManagedParameter, release
from patrickstar.engine.pieces import PiecedParameter, become_ordinary
from patrickstar.engine.state import ModelState
from patrickstar.memory import Access, Use

_PLAIN = torch._C.DisableTorchFunctionSubclass


def hand_back(module: nn.Module, state: ModelState) -> bool:
    """Make the parameters of `module` ordinary ones; False if there is no room for them.

    Gradients, masters and moments are given up first.
    """
    if state.ranks is not None and state.ranks.shards_parameters:
        return False  # the other ranks would have to take part, and may be gone
    manager = state.manager
    account = manager.ledger.tiers[0]
    sizes = [aligned.parameter.nbytes for aligned in state.aligned]
    need = sum(sizes) + max(sizes, default=0) + account.other
    if account.capacity is not None and need > account.capacity:
        return False
    for aligned in state.aligned:
        for chunk in aligned.kept():
            if chunk is not aligned.parameter:
                manager.release(chunk)
    for aligned in state.aligned:
        manager.set_other(0, account.other + aligned.parameter.nbytes)
        with manager.use([Use(aligned.parameter.id, Access.READ)]):
            for slot in aligned.slots:
                with _PLAIN(), torch.no_grad():
                    release(slot.parameter, slot.parameter.detach().clone())
        manager.release(aligned.parameter)
    for parameter in module.parameters():
        assert not isinstance(parameter, ManagedParameter), "every managed parameter has a slot"
        if isinstance(parameter, PiecedParameter):
            become_ordinary(parameter)
    return True
