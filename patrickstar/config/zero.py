"""``zero_optimization``: what ZeRO's stages and offload blocks mean under memory budgets."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from patrickstar.config.key import honoured
from patrickstar.config.types import Bool, Int, Section, Str


class Offload(Section):
    """``offload_param`` and ``offload_optimizer``."""

    device: Literal["none", "cpu", "nvme"] = honoured("none", "the lowest tier these may go to")
    nvme_path: Str | None = honoured(None, "folder of the disk tier where device is nvme")
    pin_memory: Bool = honoured(True, "page-locked host chunks")


class ZeroOptimization(Section):
    """``zero_optimization``."""

    stage: Annotated[Int, Field(ge=0, le=3)] = honoured(0, "what data parallelism shards")
    offload_param: Offload | None = honoured(None, "parameters may leave the device")
    offload_optimizer: Offload | None = honoured(None, "optimizer states may leave the device")
