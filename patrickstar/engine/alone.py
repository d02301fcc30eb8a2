"""Parameters that one rank has for itself, as expert parallelism of others leaves them.

Every rank holds experts of its own, and the user's model sends tokens to them and back
(`torch.distributed`'s all-to-all). Such a parameter is marked as in DeepSpeed and Megatron, by an
attribute `allreduce` that is False. It lies in chunks that no other rank has a part of, at every
stage of ZeRO: its values are this rank's from the beginning, its gradient travels nowhere.

What it is a gradient of is as for everything else: the mean of the losses of all ranks. The
backward of the all-to-all has brought what every rank's loss says of it, so the sum is there, and
is divided by the number of ranks. In the global norm each counts once.

The mark has to be there when a module registers the parameter, since what several ranks build
together is the first rank's from then on; so there is a context that marks what is made in it.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from patrickstar.engine.ranks import Ranks
from patrickstar.engine.split import split_of
from patrickstar.errors import ConfigError

_MARK = "allreduce"
_TELLING = 64  # elements
_REPLICATED = re.compile(r"ep_size_(\d+)")  # DeepSpeed's name of a group of ranks


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is marked as one rank's own."""
    return not getattr(tensor, _MARK, True)


def mark_alone(tensor: torch.Tensor) -> None:
    """Mark `tensor` as one rank's own."""
    setattr(tensor, _MARK, False)


@contextmanager
def local_to_rank() -> Iterator[None]:
    """Parameters made inside belong to this rank alone; see docs/several-gpus.md.

    They get the attribute `allreduce = False`, also where no engine is there to see it.
    """
    plain: Any = nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        made = plain(cls, data, requires_grad)
        mark_alone(made)
        return made

    nn.Parameter.__new__ = new  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Parameter.__new__ = plain  # type: ignore[method-assign]


def names_alone(module: nn.Module) -> list[str]:
    """Parameters that are marked, and buffers of modules that have no others."""
    found = [name for name, parameter in module.named_parameters() if is_alone(parameter)]
    for prefix, owner in module.named_modules():
        marks = [is_alone(parameter) for parameter in owner.parameters()]
        if marks and all(marks):
            found += [name for name, _ in owner.named_buffers(prefix, recurse=False)]
    return found


@dataclass(frozen=True)
class StoredNames:
    """What ranks have for themselves is called in checkpoints, which have it of all ranks.

    The same name on several ranks means other experts: it gets the number of the rank. A name that
    only one rank has stays as it is, so any number of ranks can go on with it.

    Attributes:
        own: what this rank's are called, by their name in the module.
        others: what those of other ranks are called.
    """

    own: dict[str, str] = field(default_factory=dict)
    others: frozenset[str] = frozenset()

    @property
    def anywhere(self) -> bool:
        """Whether some rank has something for itself."""
        return bool(self.own or self.others)

    def of(self, name: str) -> str:
        return self.own.get(name, name)


def stored_names(ranks: Ranks | None, names: Sequence[str]) -> StoredNames:
    """Agree on what checkpoints call these; called on all ranks."""
    if ranks is None:
        return StoredNames()
    of_ranks = ranks.comm.control.exchange_json("names of what ranks have alone", list(names))
    everywhere = [name for there in of_ranks for name in there]
    times = {name: everywhere.count(name) for name in set(everywhere)}
    keys = [
        {name: name if times[name] == 1 else f"{name}.rank{place}" for name in there}
        for place, there in enumerate(of_ranks)
    ]
    own = keys.pop(ranks.place)
    return StoredNames(own, frozenset(key for there in keys for key in there.values()))


class Beginnings:
    """A digest of what this rank has for itself, by the first elements of each tensor."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._any = False

    def add(self, name: str, values: torch.Tensor) -> None:
        some = values.detach().flatten()[:_TELLING].float().cpu()
        self._digest.update(name.encode() + some.numpy().tobytes())
        self._any = True

    def digest(self) -> bytes:
        """Empty if there is nothing."""
        return self._digest.digest() if self._any else b""


def warn_of_copies(ranks: Ranks, beginnings: Beginnings) -> None:
    """Say so if what two ranks have for themselves begins alike; called on all ranks."""
    told = ranks.comm.control.exchange_bytes("how experts begin", beginnings.digest())
    mine = told[ranks.place]
    alike = [
        rank for rank, other in zip(ranks.comm.topology.ranks, told, strict=True) if other == mine
    ]
    if mine and len(alike) > 1:
        warnings.warn(
            f"what ranks {alike} have for themselves (allreduce=False) begins with the same names "
            "and values. If these are copies of one expert, they will drift apart: an expert has "
            "to be on one rank. If experts are to begin alike, all is well",
            stacklevel=2,
        )


def refuse_what_cannot_be_alone(module: nn.Module, ranks: Ranks) -> None:
    """Refuse marks that mean something else than one rank.

    Raises:
        ConfigError: it names the parameter.
    """
    size = len(ranks.comm.topology.ranks)
    for name, parameter in module.named_parameters():
        if not is_alone(parameter):
            continue
        found = _REPLICATED.fullmatch(str(getattr(parameter, "group_name", "")))
        if found and int(found[1]) != size:
            raise ConfigError(
                f"parameter {name!r} has allreduce=False and the group_name {found[0]!r}: of "
                f"{size} ranks, several would hold the same expert, and nobody would average its "
                f"gradients. Spread the experts over all {size} ranks, each on one of them"
            )
        if split_of(parameter) is not None:
            raise ConfigError(
                f"parameter {name!r} has allreduce=False and is a DTensor; what belongs to this "
                "rank alone must be an ordinary tensor: parameter.to_local()"
            )


def refuse_late_marks(parameters: Iterable[tuple[str, Any]]) -> None:
    """Refuse parameters that were marked when they were shared already.

    Args:
        parameters: names, and parameters that live in chunks or not.

    Raises:
        ConfigError: it names one of them.
    """
    late = [name for name, parameter in parameters if is_alone(parameter) and _is_shared(parameter)]
    if late:
        raise ConfigError(
            f"{len(late)} parameters got allreduce=False when they had been taken for those that "
            f"all ranks have alike, {late[0]!r} among them: their values may be the first rank's "
            "by now. Make them under `with patrickstar.local_to_rank():`, or set the mark before "
            "a module gets them, or pass the model as a ready module instead of a provider"
        )


def _is_shared(parameter: Any) -> bool:
    home = parameter.__dict__.get("_home")
    if home is None or home.sharding is None:
        return False
    for part in getattr(parameter, "pieces", [parameter]):
        if not home.sharding.is_alone(home.manager.chunk(home.place(part)[0])):
            return True
    return False
