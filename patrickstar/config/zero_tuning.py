"""Keys of ``zero_optimization`` that tune DeepSpeed's machinery and change no result.

They are accepted, so that a config can be moved as it is, and each says what takes its place.
"""

from __future__ import annotations

import sys
from typing import Any

from patrickstar.config.key import Key, Status, accepted, within
from patrickstar.config.types import Bool, Int, Str

_CHUNK = "a chunk is what is reduced and gathered; see `patrickstar.chunk_size`"
_PLAN = "the planner fetches and evicts chunks after the trace, inside `patrickstar.memory`"
_LEAF = "chunks are fetched where they are used, so any module may be a leaf"
_TABLES = "there is no such machinery here"


def _stage3(name: str, kind: Any, default: Any, meaning: str, because: str) -> tuple[Key, Key]:
    """A key that DeepSpeed reads with and without the prefix ``stage3_``."""
    return (
        accepted(f"zero_optimization.stage3_{name}", kind, default, meaning, because),
        accepted(f"zero_optimization.{name}", kind, default, meaning, because),
    )


_ALL: tuple[tuple[str, Any, Any, str, str], ...] = (
    ("contiguous_gradients", Bool, True, "copy gradients into one buffer", "chunks are one buffer"),
    ("reduce_scatter", Bool, True, "reduce-scatter instead of all-reduce", _CHUNK),
    ("reduce_bucket_size", Int, 500_000_000, "elements reduced at a time", _CHUNK),
    ("use_multi_rank_bucket_allreduce", Bool, True, "all-reduce buckets of all ranks", _CHUNK),
    ("allgather_partitions", Bool, True, "all-gather instead of broadcasts", _CHUNK),
    ("allgather_bucket_size", Int, 500_000_000, "elements gathered at a time", _CHUNK),
    ("compute_grad_norm", Bool, True, "keep the global gradient norm", "the norm is always there"),
    (
        "load_from_fp32_weights",
        Bool,
        True,
        "load master weights of a checkpoint, not its 16-bit weights",
        "a checkpoint's master weights are always loaded where it has them",
    ),
    (
        "elastic_checkpoint",
        Bool,
        False,
        "checkpoints for another number of ranks",
        "any number of ranks can resume any checkpoint",
    ),
    ("sub_group_size", Int, 1_000_000_000, "elements updated at a time", _CHUNK),
    (
        "ignore_unused_parameters",
        Bool,
        True,
        "let parameters be unused in a step",
        "unused parameters are always allowed",
    ),
    ("legacy_stage1", Bool, False, "the first stage 1", _TABLES),
    ("round_robin_gradients", Bool, False, "copy gradients rank by rank", _CHUNK),
    ("parameter_alignment", Bool, False, "align parameters in flat buffers", "chunks are aligned"),
    (
        "zero_hpz_partition_size",
        Int,
        1,
        "ranks of the secondary parameter partition",
        "parameters have one partition",
    ),
    ("memory_efficient_linear", Bool, True, "a linear layer that saves less", _PLAN),
    (
        "pipeline_loading_checkpoint",
        Bool,
        False,
        "load checkpoints in turns",
        "a host reads weights once, whatever its number of ranks",
    ),
    (
        "override_module_apply",
        Bool,
        True,
        "gather parameters in `module.apply`",
        "parameters are gathered wherever they are used",
    ),
    ("log_trace_cache_warnings", Bool, False, "warn of an invalid trace", _PLAN),
    ("enable_sanity_checks", Bool, False, "check DeepSpeed's state", "illegal states always raise"),
    (
        "save_muon_momentum_buffer_in_memory",
        Bool,
        False,
        "keep Muon's momentum out of NVMe",
        _PLAN,
    ),
    (
        "stage3_gather_fp16_weights_on_model_save",
        Bool,
        False,
        "old name of stage3_gather_16bit_weights_on_model_save",
        "`save_16bit_model` always gathers",
    ),
)

_STAGE3 = (
    ("prefetch_bucket_size", Int, 50_000_000, "elements fetched ahead", _PLAN),
    ("param_persistence_threshold", Int, 100_000, "smaller parameters stay whole", _PLAN),
    ("model_persistence_threshold", Int, sys.maxsize, "elements of such parameters", _PLAN),
    ("max_live_parameters", Int, 1_000_000_000, "elements on a device", _PLAN),
    ("max_reuse_distance", Int, 1_000_000_000, "keep what is used again this soon", _PLAN),
    (
        "gather_16bit_weights_on_model_save",
        Bool,
        False,
        "gather weights in `save_16bit_model`",
        "`save_16bit_model` always gathers",
    ),
    ("module_granularity_threshold", Int, 0, "fetch small modules as one", _PLAN),
    ("use_all_reduce_for_fetch_params", Bool, False, "fetch with all-reduce", _CHUNK),
    ("allgather_sequential", Bool, False, "gather parameters one by one", _CHUNK),
)

_NAMES = list[Str] | Str

TUNING_KEYS: tuple[Key, ...] = (
    *(accepted(f"zero_optimization.{name}", *rest) for name, *rest in _ALL),
    *(key for row in _STAGE3 for key in _stage3(*row)),
    *within(
        Key(
            "zero_optimization.leaf_module",
            Status.ACCEPTED,
            {},
            "modules that are fetched as a whole",
            _LEAF,
        ),
        (
            accepted(
                "classes", _NAMES, "Mixtral's and Qwen's mixture-of-experts blocks", "by class"
            ),
            accepted("names", _NAMES, [], "by name"),
            accepted("name_suffixes", _NAMES, [], "by the end of the name"),
        ),
    ),
)
