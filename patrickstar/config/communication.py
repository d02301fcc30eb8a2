"""How gradients are combined over ranks. The keys are at the top level (see `Config`)."""

from __future__ import annotations

from patrickstar.config.key import UNSET, Key, Status, accepted, rejected, within
from patrickstar.config.types import Bool, DType, Str

OTHER_KEYS: tuple[Key, ...] = (
    rejected(
        "gradient_allreduce_op",
        Str,
        "mean",
        "combine gradients of ranks by mean or sum",
        "gradients are averaged; multiply the loss by the number of ranks for a sum",
        harmless=("mean",),
    ),
    rejected(
        "managed_gradient_accumulation",
        Bool,
        True,
        "count micro-batches in the engine",
        "leave it out, and set accumulation boundaries with "
        "`engine.set_gradient_accumulation_boundary`",
        harmless=(True,),
    ),
    accepted(
        "disable_allgather",
        Bool,
        False,
        "broadcast updated parameters",
        "DeepSpeed ignores it too; chunks are gathered",
    ),
    accepted(
        "seq_parallel_communication_data_type",
        DType | None,
        "fp32",
        "dtype of communication in sequence parallelism",
        "there is no sequence parallelism here",
    ),
    *within(
        Key(
            "comms_logger",
            Status.ACCEPTED,
            UNSET,
            "log collectives",
            "`patrickstar.comm` counts bytes and time of every collective",
            switch=("enabled", False),
        ),
        (
            accepted("enabled", Bool, False, "log collectives"),
            accepted("prof_all", Bool, True, "all of them"),
            accepted("prof_ops", list[Str], [], "or these"),
            accepted("verbose", Bool, False, "log each call"),
            accepted("debug", Bool, False, "log who called"),
        ),
    ),
)
