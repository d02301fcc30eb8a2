"""Our own section: memory budgets per tier, chunks and policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from patrickstar.config.key import honoured
from patrickstar.config.types import Bool, PositiveInt, Section, Str
from patrickstar.memory.sizes import parse_bytes


def _size(value: Any) -> int | None:
    if value is None or (isinstance(value, str) and value.strip().lower() == "auto"):
        return None
    return parse_bytes(value)


def _disk(value: Any) -> Any:
    """``"PATH"`` or ``"PATH:SIZE"`` as the object they stand for."""
    if not isinstance(value, str):
        return value
    path, colon, size = value.rpartition(":")
    if not colon or not path:
        return {"path": value}
    try:
        parse_bytes(size)
    except ValueError:
        return {"path": value}
    return {"path": path, "size": size}


def _path(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError("expected the path of a folder")
    return Path(value)


Size = Annotated[int | None, BeforeValidator(_size)]


class Disk(Section):
    """``patrickstar.memory.disk``."""

    path: Annotated[Path, BeforeValidator(_path)] = honoured(..., "folder of the spool file")
    size: Size = honoured(None, "budget of the disk tier; null means what the disk has free")


class Memory(Section):
    """``patrickstar.memory``."""

    device: Size = honoured(None, "budget of the compute device; null means none of its own")
    host: Size = honoured(None, "budget of CPU memory; null means no limit")
    disk: Annotated[Disk | None, BeforeValidator(_disk)] = honoured(
        None, "the lowest tier: an object, or the string 'PATH' or 'PATH:SIZE'"
    )


class PatrickStar(Section):
    """The section ``patrickstar``."""

    memory: Memory = honoured(Memory(), "memory budgets per tier")
    chunk_size: Literal["auto"] | PositiveInt = honoured("auto", "elements of a chunk")
    piece_size: PositiveInt = honoured(
        2**26, "elements; a parameter longer than this is used in pieces"
    )
    policy: Str = honoured("planned", "'planned', 'lru', 'fifo', or 'package.module:Class'")
    prefetch: Bool = honoured(True, "fetch chunks ahead of their use")
    deepspeed_exact: Bool = honoured(False, "reproduce DeepSpeed's arithmetic to the bit")
