"""``checkpoint``: how checkpoints are written and read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from patrickstar.config.key import UNSET, Key, Status, accepted, honoured, rejected, within
from patrickstar.config.types import Bool, Int, Section, Str, Upper

_WRITER = "checkpoints have a writer of their own"


class Checkpoint(Section):
    """``checkpoint``."""

    tag_validation: Annotated[Literal["WARN", "IGNORE", "FAIL"], Upper] = honoured(
        "WARN",
        "what to do when ranks save under different tags: Warn, Ignore or Fail",
        note="the first rank's tag is taken",
    )


OTHER_KEYS: tuple[Key, ...] = (
    rejected(
        "checkpoint.load_universal",
        Bool,
        False,
        "load a universal checkpoint",
        "`patrickstar import-checkpoint` reads DeepSpeed's checkpoints; our own resume on any "
        "number of ranks",
    ),
    rejected(
        "checkpoint.use_node_local_storage",
        Bool,
        False,
        "save to a disk of each node",
        "save to a folder that all nodes see",
    ),
    accepted(
        "checkpoint.checkpoint_serialization",
        Bool,
        True,
        "write `torch.save`'s zip format",
        "checkpoints are safetensors files",
    ),
    *within(
        Key(
            "checkpoint.parallel_write",
            Status.ACCEPTED,
            {},
            "share the writing of a pipeline stage",
            "every rank writes its own shard",
        ),
        (accepted("pipeline_stage", Bool, False, "over its data-parallel ranks"),),
    ),
    *within(
        Key("checkpoint.writer", Status.ACCEPTED, None, "DeepSpeed's writers", _WRITER),
        (
            accepted("type", Str, "FAST", "mock, python or fast"),
            accepted("io_buffer_size", Int, 64 * 1024**2, "bytes of a buffer"),
            accepted("io_buffer_double", Bool, True, "two buffers"),
            accepted("show_statistics", Bool, False, "print statistics"),
            accepted("data_parallel", Str | None, None, "replica, socket or machine"),
            accepted("decoupled", Bool, False, "write while training goes on"),
            accepted("io_multiplier", Int, 1, "writers per device"),
        ),
    ),
    Key(
        "datastates_ckpt",
        Status.ACCEPTED,
        UNSET,
        "write checkpoints with DataStates",
        _WRITER,
        Any,
        (False,),
        section=True,
        free=True,
    ),
)
