"""``zero_optimization``: what data parallelism shards, and what may leave the device.

A stage says what is sharded; where chunks live is a matter of budgets, at every stage. Most other
keys tune DeepSpeed's buckets, prefetching and partitions, whose place chunks and the planner take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from patrickstar.config import offload
from patrickstar.config.key import Key, Status, accepted, honoured, rejected, renamed, within
from patrickstar.config.memory import Disk, Memory
from patrickstar.config.offload import Offload
from patrickstar.config.types import Bool, Fraction, Int, Section, Str
from patrickstar.config.warning import Notes
from patrickstar.config.zero_tuning import TUNING_KEYS
from patrickstar.errors import ConfigError


class ZeroOptimization(Section):
    """``zero_optimization``."""

    stage: Annotated[Int, Field(ge=0, le=3)] = honoured(
        0,
        "what is sharded over ranks: 0 nothing, 1 optimizer states, 2 and gradients, "
        "3 and parameters",
    )
    overlap_comm: Bool | None = honoured(
        None, "gather and reduce chunks beside the computation; null is true"
    )
    offload_param: Offload | None = honoured(None, "parameters may leave the device")
    offload_optimizer: Offload | None = honoured(None, "optimizer states may leave the device")


def _device(value: bool) -> str:
    return "cpu" if value else "none"


OTHER_KEYS: tuple[Key, ...] = (
    *offload.OTHER_KEYS,
    renamed(
        "zero_optimization.cpu_offload",
        Bool | None,
        None,
        "zero_optimization.offload_optimizer.device",
        "optimizer states may leave the device",
        convert=_device,
    ),
    renamed(
        "zero_optimization.cpu_offload_param",
        Bool | None,
        None,
        "zero_optimization.offload_param.device",
        "parameters may leave the device",
        convert=_device,
    ),
    accepted(
        "zero_optimization.cpu_offload_use_pin_memory",
        Bool,
        None,
        "page-lock host memory",
        "an old key that DeepSpeed ignores too; use `pin_memory` of the offload blocks",
    ),
    *TUNING_KEYS,
    *within(
        Key(
            "zero_optimization.zenflow",
            Status.REJECTED,
            None,
            "update unimportant gradients late",
            "it changes the numbers; leave it out, updates are exact and transfers are hidden",
        ),
        (
            accepted("topk_ratio", Fraction, 0.1, "share of important columns"),
            accepted("select_strategy", Str, "auto", "choose them by auto, step or epoch"),
            accepted("select_interval", Int | Str, "auto", "steps or epochs between choices"),
            accepted("update_interval", Int | Str, "auto", "steps between late updates"),
            accepted("overlap_step", Bool, False, "update on the CPU during the next step"),
            accepted("offload", Bool, False, "keep their states on the CPU"),
            accepted("auto_ratio", Fraction, 0.99, "threshold of update_interval auto"),
            accepted("full_warm_up_rounds", Int, 0, "first steps with full updates"),
            accepted("pt_reserved_cores_perc", Fraction, 0.5, "share of cores kept for PyTorch"),
            accepted("steps_per_epoch", Int, None, "set by DeepSpeed itself"),
        ),
    ),
    rejected(
        "zero_optimization.zero_quantized_weights",
        Bool,
        False,
        "quantise weights that are gathered",
        "it changes the numbers; leave it out",
    ),
    rejected(
        "zero_optimization.zero_quantized_nontrainable_weights",
        Bool,
        False,
        "keep frozen weights quantised",
        "it changes the numbers; leave it out, frozen weights can live on host or disk",
    ),
    rejected(
        "zero_optimization.zero_quantized_gradients",
        Bool,
        False,
        "quantise gradients that are reduced",
        "it changes the numbers; leave it out, or set `communication_data_type`",
    ),
    rejected(
        "zero_optimization.mics_shard_size",
        Int,
        -1,
        "ranks of a shard group",
        "DeepSpeed has removed it; use `zero_optimization.stage` 3",
        harmless=(-1,),
    ),
    rejected(
        "zero_optimization.mics_hierarchical_params_gather",
        Bool,
        False,
        "gather inside nodes first",
        "DeepSpeed has removed it; leave it out",
    ),
    rejected(
        "zero_optimization.zeropp_loco_param",
        Any,
        None,
        "error feedback of quantised gradients",
        "DeepSpeed has removed it; leave it out",
    ),
    accepted(
        "allgather_size",
        Int,
        500_000_000,
        "bucket of the first ZeRO, with `zero_optimization: true`",
        "chunks are what is gathered",
    ),
)


def disk_tier(zero: ZeroOptimization, memory: Memory, notes: Notes) -> Disk | None:
    """The disk tier that the sections ask for together.

    Raises:
        ConfigError: an offload block names NVMe, and nothing says where that is.
    """
    blocks = {"offload_optimizer": zero.offload_optimizer, "offload_param": zero.offload_param}
    chosen = None if memory.disk is None else memory.disk.path
    source = "patrickstar.memory.disk"
    for name, block in blocks.items():
        if block is None or block.device != "nvme":
            continue
        path = f"zero_optimization.{name}.nvme_path"
        if block.nvme_path is None:
            if memory.disk is None:
                raise ConfigError(
                    f"zero_optimization.{name}.device is 'nvme', but {path} is missing; give it "
                    "the path of a folder, or set patrickstar.memory.disk"
                )
        elif chosen is None:
            chosen, source = block.nvme_path, path
        elif _differ(chosen, block.nvme_path):
            notes.add(
                path,
                f"{str(block.nvme_path)!r} is not used, the disk tier is in {str(chosen)!r} "
                f"({source})",
            )
    if memory.disk is not None or chosen is None:
        return memory.disk
    return Disk(path=chosen)


def _differ(one: Path, other: Path) -> bool:
    return one.absolute() != other.absolute()
