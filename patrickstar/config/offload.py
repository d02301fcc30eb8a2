"""``offload_param`` and ``offload_optimizer``: DeepSpeed's static split, as memory budgets.

DeepSpeed moves all parameters or all optimizer states to the device that is named. Here they go
wherever the budgets leave room, so a block only says down to which tier they may go: "cpu" is host
memory, which every run has, and "nvme" with its path is the disk tier.
"""

from __future__ import annotations

from typing import Literal

from patrickstar.config.key import Key, accepted, honoured
from patrickstar.config.types import Bool, Float, Folder, Fraction, Int, Section

_BUDGETS = "`patrickstar.memory` has the budgets, and the planner decides what goes where"
_CHUNKS = "chunks are the unit of transfer, and recycled buffers hold them"


class Offload(Section):
    """``zero_optimization.offload_param`` and ``zero_optimization.offload_optimizer``."""

    device: Literal["none", "cpu", "nvme"] = honoured(
        "none",
        "the lowest tier these may go to: none, cpu or nvme",
        note="nvme adds a disk tier; budgets decide what is moved, at any stage",
    )
    nvme_path: Folder | None = honoured(
        None, "folder of the disk tier", note="`patrickstar.memory.disk` wins over it"
    )
    pin_memory: Bool = honoured(
        True, "page-lock host memory, where there is an accelerator", note="true since 2026"
    )


def _keys(section: str, buffers: int) -> tuple[Key, ...]:
    return (
        accepted(f"{section}.buffer_count", Int, buffers, "buffers for NVMe transfers", _CHUNKS),
    )


OTHER_KEYS: tuple[Key, ...] = (
    *_keys("zero_optimization.offload_param", 5),
    accepted(
        "zero_optimization.offload_param.buffer_size",
        Int,
        100_000_000,
        "size of such a buffer",
        _CHUNKS,
    ),
    accepted(
        "zero_optimization.offload_param.max_in_cpu",
        Int,
        1_000_000_000,
        "parameter elements kept in CPU memory when offloading to NVMe",
        "`patrickstar.memory.host` bounds CPU memory",
    ),
    *_keys("zero_optimization.offload_optimizer", 4),
    accepted(
        "zero_optimization.offload_optimizer.pipeline_read",
        Bool,
        False,
        "read the next tile during an update",
        "chunks are prefetched; see `patrickstar.prefetch`",
    ),
    accepted(
        "zero_optimization.offload_optimizer.pipeline_write",
        Bool,
        False,
        "write the previous tile during an update",
        "chunks are written back while others are updated",
    ),
    accepted(
        "zero_optimization.offload_optimizer.fast_init",
        Bool,
        False,
        "initialise states on NVMe faster",
        "states are made when they are first needed",
    ),
    accepted(
        "zero_optimization.offload_optimizer.ratio",
        Fraction,
        1.0,
        "share of the update that the CPU makes",
        _BUDGETS,
    ),
    accepted(
        "zero_optimization.offload_optimizer.super_offload",
        Bool,
        False,
        "offload for superchips",
        _BUDGETS,
    ),
    accepted(
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        Float,
        0.8,
        "share of CPU cores for the update with super_offload",
        "`torch.set_num_threads` sets the threads",
    ),
)
