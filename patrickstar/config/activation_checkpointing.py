"""``activation_checkpointing``: where what a checkpointed region keeps is put.

Which regions are checkpointed is up to the model (`torch.utils.checkpoint`), as with DeepSpeed.
"""

from __future__ import annotations

from patrickstar.config.key import Key, accepted, honoured
from patrickstar.config.types import Bool, Int, Section

_SECTION = "activation_checkpointing"


class ActivationCheckpointing(Section):
    """``activation_checkpointing``."""

    cpu_checkpointing: Bool = honoured(
        False,
        "keep the inputs that checkpointed regions save in chunks on the host",
        note="from there they go to the disk when the host's budget is full; so do those of "
        "`torch.utils.checkpoint`. Without a device apart from the host, and without a disk, there "
        "is nowhere to take them. `patrickstar plan` counts them where they were made",
    )


OTHER_KEYS: tuple[Key, ...] = (
    accepted(
        f"{_SECTION}.partition_activations",
        Bool,
        False,
        "shard checkpoints over model-parallel ranks",
        "there is no model parallelism here",
    ),
    accepted(
        f"{_SECTION}.number_checkpoints",
        Int,
        None,
        "checkpoints that the contiguous buffer is for",
        "there is no such buffer",
    ),
    accepted(
        f"{_SECTION}.contiguous_memory_optimization",
        Bool,
        False,
        "copy checkpoints into one buffer",
        "freed memory is recycled instead",
    ),
    accepted(
        f"{_SECTION}.synchronize_checkpoint_boundary",
        Bool,
        False,
        "synchronise the device at each checkpoint",
        "it changes no result; use `wall_clock_breakdown` to time",
    ),
    accepted(
        f"{_SECTION}.profile",
        Bool,
        False,
        "time each checkpoint",
        "use `wall_clock_breakdown` or `torch.profiler`",
    ),
)
