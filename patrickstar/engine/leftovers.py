"""Parameters that were built into chunks and are no part of the model.

A teacher that a module hides in a list, a layer that was replaced and is still used, a copy that
somebody keeps: such a parameter went into a construction chunk when its module registered it, and
the layout of the run has no place for it. Before the construction chunks are given up it becomes an
ordinary parameter in ordinary memory, as it would be without us.
"""

from __future__ import annotations

import torch

from patrickstar.engine.construct import Nursery
from patrickstar.engine.parameter import ManagedParameter, release
from patrickstar.engine.state import ModelState
from patrickstar.memory import Access, Use

_PLAIN = torch._C.DisableTorchFunctionSubclass


def set_aside(state: ModelState, nursery: Nursery) -> int:
    """Make ordinary what lies in construction chunks and has no slot in `state`.

    Returns:
        the bytes of memory that these parameters take now, outside any chunk.
    """
    nbytes = 0
    for chunk in nursery.chunks:
        for view in nursery.manager.permanent_views(chunk):
            if id(view) in state.slots or not isinstance(view, ManagedParameter):
                continue
            with nursery.manager.use([Use(chunk.id, Access.READ)]), _PLAIN(), torch.no_grad():
                release(view, view.detach().clone())
                nursery.manager.drop_view(view)
                nbytes += view.nbytes
    return nbytes
