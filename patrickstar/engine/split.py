"""Parameters of which every rank has a part, as tensor parallelism of torch's leaves them.

Such a parameter is a DTensor: this rank's part, and how the parts make the whole. The engine keeps
the part, as a parameter like any other: in chunks, with gradients, moments, shards. An operator
that uses it is given a DTensor again, made for that use (`DTensor.from_local`, which
autograd knows); so layers and what tensor parallelism hangs on them work as they did. Everything
that is no operator (shape, `grad`, `data`, `state_dict`, a checkpoint) is of the part.

Who trains together must be told: ranks of one part, which is what `Communicator.from_mesh` with the
other dimensions of the mesh gives. Norms are of the whole: the squares of what is split are added
over the ranks that hold parts, those of what is replicated are counted once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from patrickstar.errors import ConfigError

_PLAIN = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True)
class Split:
    """How the parts of a parameter make the whole.

    Attributes:
        mesh: the `DeviceMesh` of the ranks that hold parts.
        placements: what each dimension of the mesh does to the whole.
        shape: of the whole.
        stride: of the whole.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """A DTensor over `part`, without a copy; the gradient of one is that of the other."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def dimensions(self) -> tuple[int, ...]:
        """The dimensions of the mesh along which ranks have different parts."""
        return tuple(
            number for number, placed in enumerate(self.placements) if not placed.is_replicate()
        )

    def others(self) -> set[int]:
        """The other ranks that compute with a part of this parameter, or a copy of one."""
        return {int(rank) for rank in self.mesh.mesh.flatten()} - {dist.get_rank()}


@dataclass(frozen=True)
class Spread:
    """Over which groups the parts of some parameters lie.

    Attributes:
        key: the same on ranks that hold the same parts.
        groups: process groups, one for each dimension of a mesh that splits them.
        device: that their collectives work on.
    """

    key: tuple[tuple[int, ...], ...] = ()
    groups: tuple[Any, ...] = field(default=(), compare=False)
    device: str = "cpu"

    def sum(self, values: list[float]) -> list[float]:
        """The sum of each value over all parts, in float64; called on all ranks that hold one."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        for group in self.groups:
            dist.all_reduce(total, group=group)
        return [float(value) for value in total]


def is_split(tensor: Any) -> bool:
    """Whether this is a DTensor; asked without importing what defines them."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def split_of(parameter: nn.Parameter) -> Split | None:
    """How a parameter is split that the engine keeps a part of."""
    return parameter.__dict__.get("_split")


def spread_of(parameter: nn.Parameter) -> Spread:
    """Over which groups the parts of `parameter` lie; over none if it is whole."""
    split = split_of(parameter)
    if split is None or not split.dimensions():
        return Spread()
    groups = tuple(split.mesh.get_group(number) for number in split.dimensions())
    key = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
    return Spread(key, groups, split.mesh.device_type)


def part_of(parameter: nn.Parameter) -> nn.Parameter:
    """An ordinary parameter with this rank's part of one that is a DTensor.

    Raises:
        ConfigError: the ranks hold terms of a sum.
    """
    if any(placed.is_partial() for placed in parameter.placements):  # type: ignore[attr-defined]
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} is a DTensor of which each rank has a "
            "term of a sum (Partial); shard or replicate it before it is trained"
        )
    split = Split(
        parameter.device_mesh,  # type: ignore[attr-defined]
        tuple(parameter.placements),  # type: ignore[attr-defined]
        parameter.shape,
        parameter.stride(),
    )
    with torch.no_grad():
        local = parameter._local_tensor  # type: ignore[attr-defined]
        part = nn.Parameter(local.detach().clone(), parameter.requires_grad)
    part.__dict__["_split"] = split
    return part


def as_wholes(values: Any) -> Any:
    """Arguments of an operator, with DTensors for what the engine keeps parts of."""
    if isinstance(values, torch.Tensor):
        split = split_of(values) if isinstance(values, nn.Parameter) else None
        return values if split is None else split.whole(values)
    if type(values) in (list, tuple):
        return type(values)(as_wholes(value) for value in values)
    if type(values) is dict:
        return {key: as_wholes(value) for key, value in values.items()}
    return values


def has_plain_tensors(values: Any) -> bool:
    """Whether one of these is a tensor of which a rank has all, and no number."""
    if isinstance(values, torch.Tensor):
        return not is_split(values) and values.dim() > 0
    return isinstance(values, list | tuple) and any(map(has_plain_tensors, values))


def refuse_what_cannot_be_split(module: nn.Module, together: Collection[int] | None) -> None:
    """Refuse parts that the ranks of a run do not train in.

    Args:
        together: the ranks that train together, if they are several or were named.

    Raises:
        ConfigError: it names the parameter, and what to do.
    """
    for name, how in _splits(module):
        if together is None or not how.others().isdisjoint(together):
            others = "" if together is None else f"ranks {sorted(how.others() & {*together})} of "
            raise ConfigError(
                f"parameter {name!r} is a DTensor: this rank has a part of it, and "
                f"{others}this run would take their parts for copies of it. Say who trains "
                "together: initialize_engine(..., communicator=Communicator.from_mesh(mesh, "
                "shard='data')) with the dimension of the mesh that replicates parameters (it may "
                "have size 1). What FSDP2 has sharded trains with "
                "patrickstar.optim.ChunkedAdamW(model.parameters(), ...): see "
                "docs/use-with-deepspeed-zero.md"
            )


def refuse_fsdp(module: nn.Module) -> None:
    """Refuse a module whose parameters are FSDP2's.

    Raises:
        ConfigError: with what to do.
    """
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise ConfigError(
            "fully_shard (FSDP2) manages the parameters of this model itself: hand it over without "
            "that, since the engine shards what it trains; or keep it, and train with "
            "patrickstar.optim.ChunkedAdamW(model.parameters(), ...): see "
            "docs/use-with-deepspeed-zero.md"
        )


def _splits(module: nn.Module) -> Iterator[tuple[str, Split]]:
    for name, parameter in module.named_parameters():
        split = split_of(parameter)
        if split is not None and split.others():
            yield name, split
