"""Blocks under `torch.compile`.

A compiled block runs on raw parameters and does not pass through Python for each use, so its
chunks are kept resident for the whole call. What its backward needs goes through the saved-tensor
hooks like everything else.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from patrickstar.engine.parameter import ManagedParameter
from patrickstar.engine.state import ModelState
from patrickstar.memory import Access, Use


def pin_compiled_modules(
    module: nn.Module, state: ModelState, known: weakref.WeakSet[nn.Module]
) -> None:
    """Wrap the compiled modules inside `module` that are not in `known` yet."""
    for part in module.modules():
        compiled = part.__dict__.get("_compiled_call_impl")
        is_wrapper = type(part).__name__ == "OptimizedModule"
        if (compiled is None and not is_wrapper) or part in known:
            continue
        known.add(part)
        if is_wrapper:
            part.forward = _pinned(part.forward, part, state)
        else:
            part._compiled_call_impl = _pinned(compiled, part, state)


def _pinned(call: Any, module: nn.Module, state: ModelState) -> Any:
    owner = weakref.ref(module)

    def run(*args: Any, **kwargs: Any) -> Any:
        part = owner()
        assert part is not None
        chunks = {
            state.of(p)[0].parameter.id: None
            for p in part.parameters()
            if type(p) is ManagedParameter
        }
        with state.manager.use([Use(chunk, Access.READ) for chunk in chunks]):
            return call(*args, **kwargs)

    return run
