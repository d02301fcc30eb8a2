"""Modules that are built straight into chunks ahead of `initialize`.

DeepSpeed's scripts construct their model under `zero.Init` and pass it to `initialize` later (see
`engine.zero_init`). What the constructor makes goes into construction chunks at once, so that a
model larger than memory can be built; the chunks, their manager and its tiers wait in the home of
the parameters. A later `initialize` with the same memory settings goes on with them. With other
settings, or for a module whose parts were built under several of these contexts, `bring_in` carries
the parameters over one by one.

With several ranks, chunks of a module for ZeRO stage 3 are shared from the beginning, over a
communicator of their own that is closed when the last parameter has left them: no rank ever holds
the full model. One that is never passed to `initialize` (a teacher, say) stays so, and is used by
all ranks together.

The chunks hold the parameters' own dtype until `initialize`, and the random numbers are those of an
ordinary construction. DeepSpeed casts under `zero.Init` already and draws others in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patrickstar.engine.construct import Nursery
from patrickstar.engine.home import ChunkHome
from patrickstar.engine.parameter import ManagedParameter, release
from patrickstar.engine.pieces import PiecedParameter
from patrickstar.errors import ConfigError
from patrickstar.memory import ChunkManager

if TYPE_CHECKING:
    from patrickstar.engine.initialize import RunSettings

_PLAIN = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True)
class Ahead:
    """What parameters were built with, for the `initialize` that comes later."""

    settings: RunSettings
    manager: ChunkManager
    home: ChunkHome
    nursery: Nursery

    def connected(self) -> AbstractContextManager[object]:
        """Closes the connection with the other ranks at its end; they learn of an exception."""
        ranks = self.settings.ranks
        return nullcontext() if ranks is None else ranks.comm

    def close(self) -> None:
        """Nobody lives here any more."""
        self.home.ahead = None
        with self.connected():
            pass


def take_over(provider: Callable[[], nn.Module] | nn.Module, settings: RunSettings) -> Ahead | None:
    """What `provider`, a module, was built with, if a run with `settings` can go on with it.

    A run that is recorded has a manager that is watched from its beginning.
    """
    if not isinstance(provider, nn.Module):
        return None
    for parameter in provider.parameters():
        home = getattr(parameter, "_home", None)
        ahead = home.ahead if isinstance(home, ChunkHome) else None
        if ahead is not None and settings.record is None:
            return ahead if _memory(ahead.settings) == _memory(settings) else None
    return None


def bring_in(module: nn.Module, nursery: Nursery) -> None:
    """Carry parameters that live with another manager than that of `nursery` over to it.

    Each leaves its old chunk before the next one moves, and a chunk that nobody lives in any more
    is given up, so both together hold hardly more than the model.

    Raises:
        ConfigError: another engine trains the module, or did until it was closed.
    """
    strangers = [
        parameter
        for parameter in module.parameters()
        if isinstance(parameter, ManagedParameter | PiecedParameter)
        and _home(parameter) is not nursery.home
    ]
    if any(_home(parameter).laid_out for parameter in strangers):
        raise ConfigError(
            "this model belongs to another engine, whose chunks hold its weights; build it anew "
            "for this one, and take weights along with state_dict and load_state_dict"
        )
    lodgers: dict[tuple[int, int], int] = {}
    for parameter in strangers:
        for part in _parts(parameter):
            room = _room(part)
            lodgers[room] = lodgers.get(room, 0) + 1
    homes = {id(_home(parameter)): _home(parameter) for parameter in strangers}
    for parameter in strangers:
        parts, home = _parts(parameter), _home(parameter)
        manager = home.manager
        rooms = [_room(part) for part in parts]
        whole = torch.cat([_copy(part) for part in parts]) if len(parts) > 1 else _copy(parts[0])
        for part in parts:
            manager.drop_view(part)
            release(part, whole)
        if isinstance(parameter, PiecedParameter):
            release(parameter, whole)
        for room in rooms:
            lodgers[room] -= 1
            chunk = manager.chunk(room[1])
            # Other modules of the same context may live there, too.
            if not lodgers[room] and not manager.permanent_views(chunk) and home.ahead is not None:
                home.ahead.nursery.give_up(chunk)
        nursery.adopt(parameter)
    for home in homes.values():
        if home.ahead is not None and not home.ahead.nursery.chunks:
            home.ahead.close()


def _parts(parameter: nn.Parameter) -> list[nn.Parameter]:
    return list(parameter.pieces) if isinstance(parameter, PiecedParameter) else [parameter]


def _home(parameter: Any) -> ChunkHome:
    home: ChunkHome = parameter._home
    return home


def _room(parameter: Any) -> tuple[int, int]:
    """Which chunk of which manager a parameter lives in."""
    return id(parameter._home.manager), parameter._home.place(parameter)[0]


def _copy(parameter: Any) -> torch.Tensor:
    with parameter._home.use([parameter], writes=[]), _PLAIN():
        copy: torch.Tensor = parameter.detach().clone()
        return copy


def _memory(settings: RunSettings) -> tuple[Any, ...]:
    """What a manager and the chunks of a nursery depend on."""
    return (
        settings.device_budget,
        settings.host_budget,
        settings.disk,
        settings.verify_disk,
        settings.device,
        settings.piece_size,
        settings.plan,
        settings.prefetch,
        type(settings.policy),
    )
