"""``activation_checkpointing``: what is kept of a forward, and where."""

from __future__ import annotations

from patrickstar.config.key import honoured
from patrickstar.config.types import Bool, Int, Section


class ActivationCheckpointing(Section):
    """``activation_checkpointing``."""

    partition_activations: Bool = honoured(False, "shard checkpoints over model-parallel ranks")
    contiguous_memory_optimization: Bool = honoured(False, "copy checkpoints into one buffer")
    cpu_checkpointing: Bool = honoured(False, "keep checkpoints in CPU memory")
    number_checkpoints: Int | None = honoured(None, "checkpoints the buffer is sized for")
    synchronize_checkpoint_boundary: Bool = honoured(False, "synchronize at every checkpoint")
    profile: Bool = honoured(False, "time forward and backward of every checkpoint")
