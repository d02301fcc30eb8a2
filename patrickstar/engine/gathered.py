"""`deepspeed.zero.GatheredParameters`: parameters in full, to read or to change in place.

A managed parameter is in full whenever it is used, and what changes it in place reaches its chunk
and, at the next update, its master weight. So this context promises one thing more: while it lasts,
the parameters stay where they are, as long as they fit the budget together. Beyond that they come
one at a time as they are used, and the budget holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from patrickstar.engine.parameter import ManagedParameter
from patrickstar.engine.pieces import PiecedParameter
from patrickstar.errors import BudgetError
from patrickstar.memory import Access, ChunkManager, Use


class GatheredParameters:
    """Parameters that stay in full as long as this context lasts.

    Args:
        params: one parameter or several; those that live in no chunk are left as they are.
        modifier_rank: the rank whose changes count; all ranks have them afterwards. Without one a
            change is kept, too, and all ranks must make the same; DeepSpeed drops it.
        fwd_module: accepted: a parameter may be used anywhere without being registered.
        enabled: without it nothing happens.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[Any],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self._params = given if enabled else []
        self._modifier = modifier_rank
        self._kept = ExitStack()

    def __enter__(self) -> None:
        chunks: dict[int, dict[int, None]] = {}
        managers: dict[int, ChunkManager] = {}
        for parameter in self._params:
            pieces = parameter.pieces if isinstance(parameter, PiecedParameter) else [parameter]
            for piece in pieces:
                if isinstance(piece, ManagedParameter):
                    manager = piece._home.manager  # type: ignore[attr-defined]
                    managers[id(manager)] = manager
                    chunk, _ = piece._home.place(piece)  # type: ignore[attr-defined]
                    chunks.setdefault(id(manager), {})[chunk] = None
        for key, manager in managers.items():
            uses = [Use(chunk, Access.READ) for chunk in chunks[key]]
            try:
                self._kept.enter_context(manager.use(uses))
            except BudgetError:
                continue  # each comes when it is used

    def __exit__(self, *raised: Any) -> None:
        if self._modifier is not None and raised[0] is None:
            for parameter in self._params:
                _take_from(parameter, self._modifier)
        self._kept.close()


def _take_from(parameter: Any, rank: int) -> None:
    """Give every rank the parameter that `rank` has."""
    home: Any = getattr(parameter, "_home", None)
    if home is None or home.sharding is None:
        return
    pieces = parameter.pieces if isinstance(parameter, PiecedParameter) else [parameter]
    for piece in pieces:
        chunk, offset = home.place(piece)
        if home.sharding.is_alone(home.manager.chunk(chunk)):
            continue  # no other rank has it
        name = f"gathered parameter of shape {tuple(piece.shape)}"
        with home.use([piece], writes=[piece]), torch.no_grad():
            flat = home.manager.tensor(home.manager.chunk(chunk))
            part = flat[offset : offset + piece.numel()]
            home.sharding.ranks.from_rank(name, part, rank)
