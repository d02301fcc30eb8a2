"""`torch.distributed` for scripts: the names of `deepspeed.comm` that ordinary scripts use.

With a process group they are torch's own calls. A process without one is alone: it has rank 0 of 1,
a barrier is passed at once, and a reduction or broadcast leaves the tensor as it is.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "is_available",
    "is_initialized",
    "new_group",
    "reduce",
]


def is_available() -> bool:
    return dist.is_available()


def is_initialized() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if is_initialized() else 0


def get_local_rank() -> int:
    """The rank on this machine, from the launcher's environment."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if is_initialized() else 1


def get_world_group() -> Any:
    """The group of all ranks; None without a process group."""
    return dist.group.WORLD if is_initialized() else None


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return dist.get_global_rank(group, group_rank) if is_initialized() and group else group_rank


def new_group(ranks: list[int] | None = None) -> Any:
    return dist.new_group(ranks) if is_initialized() else None


def destroy_process_group(group: Any = None) -> None:
    if is_initialized():
        dist.destroy_process_group(group)


def barrier(group: Any = None, async_op: bool = False, **named: Any) -> Any:
    return dist.barrier(group=group, async_op=async_op) if is_initialized() else None


def all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """In place, over `group`; returns the work with `async_op`."""
    return dist.all_reduce(tensor, op, group, async_op) if is_initialized() else None


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    return dist.reduce(tensor, dst, op, group, async_op) if is_initialized() else None


def broadcast(tensor: torch.Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
    return dist.broadcast(tensor, src, group, async_op) if is_initialized() else None


def broadcast_object_list(
    object_list: list[Any], src: int, group: Any = None, device: Any = None
) -> None:
    if is_initialized():
        dist.broadcast_object_list(object_list, src, group, device)


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Each rank's `tensor` into `tensor_list`; a process alone copies its own."""
    if is_initialized():
        return dist.all_gather(tensor_list, tensor, group, async_op)
    tensor_list[0].copy_(tensor)
    return None


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    if is_initialized():
        dist.all_gather_object(object_list, obj, group)
    else:
        object_list[0] = obj
