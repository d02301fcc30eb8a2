"""Keys of the original PatrickStar.

Each is honoured, or answered with a warning that names the key that does its work today. They
always warn, also where they ask for nothing: they are to be deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patrickstar.config.key import UNSET, Key, Status, accepted, renamed, within
from patrickstar.config.types import Bool, Float, Int
from patrickstar.config.warning import Notes

_DEVICE = "memory is budgeted in bytes now; use `patrickstar.memory.device`"
_HOST = "memory is budgeted in bytes now; use `patrickstar.memory.host`"
_RANKS = "start ranks with `torchrun`, and give each its part of `patrickstar.memory.device`"
_POLICY = "the planner places chunks after the trace; see `patrickstar.policy`"


def _old(path: str, kind: object, meaning: str, because: str) -> Key:
    return accepted(path, kind, UNSET, meaning, because, harmless=())


OTHER_KEYS: tuple[Key, ...] = (
    renamed("default_chunk_size", Int, UNSET, "patrickstar.chunk_size", "elements of a chunk"),
    _old(
        "release_after_init",
        Bool,
        "build the whole model on each rank first",
        "models are built inside `patrickstar.memory`, with the same random numbers as elsewhere",
    ),
    _old(
        "use_cpu_embedding",
        Bool,
        "keep embeddings on the CPU",
        "an embedding is looked up where it lives, and `patrickstar.memory.device` decides where",
    ),
    _old(
        "use_fake_dist",
        Bool,
        "simulate ranks on one device",
        _RANKS,
    ),
    _old(
        "use_fp16_sharding",
        Bool,
        "shard fp16 parameters over ranks",
        "use `zero_optimization.stage` 3",
    ),
    _old(
        "optimizer.params.use_hybrid_adam",
        Bool,
        "update on CPU and GPU",
        "the update runs where there is room; see `patrickstar.memory.device`",
    ),
    *within(
        Key("client", Status.ACCEPTED, UNSET, "the original memory manager", ""),
        (
            Key("mem_tracer", Status.ACCEPTED, UNSET, "its tracer", section=True),
            _old(
                "mem_tracer.use_async_mem_monitor",
                Bool,
                "sample memory in a thread",
                "memory is measured at every operator; see `patrickstar.policy`",
            ),
            _old(
                "mem_tracer.warmup_gpu_chunk_mem_ratio",
                Float,
                "share of GPU memory for chunks in the first iteration",
                _DEVICE,
            ),
            _old(
                "mem_tracer.overall_gpu_mem_ratio",
                Float,
                "share of GPU memory to use",
                _DEVICE,
            ),
            _old(
                "mem_tracer.overall_cpu_mem_ratio",
                Float,
                "share of CPU memory to use",
                _HOST,
            ),
            _old(
                "mem_tracer.margin_use_ratio",
                Float,
                "share of spare GPU memory for optimizer states",
                _POLICY,
            ),
            _old("mem_tracer.use_fake_dist", Bool, "simulate ranks on one device", _RANKS),
            _old(
                "mem_tracer.with_static_partition",
                Bool,
                "split model data once",
                _POLICY,
            ),
            Key("opts", Status.ACCEPTED, UNSET, "its options", section=True),
            _old(
                "opts.with_mem_saving_comm",
                Bool,
                "communicate one chunk at a time",
                "buffers in flight count towards `patrickstar.memory.device`",
            ),
            _old(
                "opts.with_mem_cache",
                Bool,
                "reuse freed chunks",
                "chunk buffers are always reused, inside `patrickstar.memory`",
            ),
            _old(
                "opts.with_async_move",
                Bool,
                "copy chunks on a stream of their own",
                "see `patrickstar.prefetch`",
            ),
        ),
    ),
)

_TELLING = ("default_chunk_size", "release_after_init", "use_cpu_embedding", "client")


def remark_on_clipping(raw: Mapping[str, Any], notes: Notes) -> None:
    """Say that gradients are clipped now, where the original PatrickStar did not clip them."""
    if "gradient_clipping" not in raw and any(name in raw for name in _TELLING):
        notes.add(
            "gradient_clipping",
            "not given, so DeepSpeed's default of 1.0 holds; the original PatrickStar did not "
            "clip, set 0 for that",
        )
