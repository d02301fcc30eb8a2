"""``patrickstar``: what DeepSpeed has no words for. Budgets of tiers, chunks and the policy.

A budget of a tier is a promise in bytes. "auto", like null, is no promise: as much as there is, and
for the device that it has no budget of its own.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from patrickstar.config.key import honoured
from patrickstar.config.types import Bool, Folder, PositiveInt, Section
from patrickstar.errors import ConfigError
from patrickstar.memory.sizes import parse_bytes

POLICIES = ("planned", "lru", "fifo")
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() == "auto"


def _size(value: Any) -> int | None:
    if value is None or _is_auto(value):
        return None
    try:
        return parse_bytes(value)
    except OverflowError:
        raise ConfigError("this size is out of range") from None


def _disk(value: Any) -> Any:
    """``"PATH"`` or ``"PATH:SIZE"`` as the object they stand for."""
    if isinstance(value, Path):
        return {"path": value}
    if not isinstance(value, str):
        return value
    path, colon, size = value.rpartition(":")
    if colon and path and (_is_auto(size) or _is_size(size)):
        return {"path": path, "size": size}
    return {"path": value}


def _is_size(text: str) -> bool:
    try:
        parse_bytes(text)
    except (ValueError, OverflowError):
        return False
    return True


def _elements(value: Any) -> Any:
    if _is_auto(value):
        return "auto"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        raise ValueError('a number of elements or "auto"')
    return value


def _policy(value: Any) -> Any:
    if isinstance(value, str) and (value in POLICIES or _CLASS.fullmatch(value)):
        return value
    near = difflib.get_close_matches(str(value).lower(), POLICIES, n=1)
    shown = "null" if value is None else repr(value)
    raise ConfigError(
        f"{shown} is no policy{f', did you mean {near[0]!r}?' if near else ';'} Use 'planned', "
        "'lru', 'fifo', or 'package.module:Class' with a class of your own"
    )


Size = Annotated[int | None, BeforeValidator(_size)]


class Disk(Section):
    """``patrickstar.memory.disk``."""

    path: Folder = honoured(..., "folder of the spool file")
    size: Size = honoured(
        None, 'budget of the disk tier, such as `"200GiB"`; null or auto: what the disk has free'
    )
    verify: Bool = honoured(
        True,
        "keep a checksum of everything on the disk and compare it when it is read, so that a disk "
        "that returns other bytes is an error",
    )


class Memory(Section):
    """``patrickstar.memory``."""

    device: Size = honoured(
        None,
        'budget of the device, such as `"8GiB"` or bytes; null or auto: most of what an '
        "accelerator has free; on a CPU, none of its own",
    )
    host: Size = honoured(None, "budget of CPU memory; null or auto: no limit")
    disk: Annotated[Disk | None, BeforeValidator(_disk)] = honoured(
        None, 'the lowest tier: an object, or `"PATH"` or `"PATH:SIZE"`'
    )


class PatrickStar(Section):
    """``patrickstar``."""

    device: str = honoured(
        "auto", 'where to compute: "auto" is the accelerator if there is one; "cpu", "cuda:0", ...'
    )
    update: Literal["auto", "host", "device"] = honoured(
        "auto",
        "where the optimizer updates weights: auto is an accelerator that has no budget, otherwise "
        "the host; an accelerator may round an update differently",
    )
    memory: Memory = honoured(Memory(), "memory budgets per tier")
    chunk_size: Annotated[int | Literal["auto"], BeforeValidator(_elements)] = honoured(
        "auto", "elements of a chunk; auto wastes least for the model"
    )
    piece_size: PositiveInt = honoured(
        2**26, "elements; a parameter longer than this is used in pieces"
    )
    policy: Annotated[str, BeforeValidator(_policy)] = honoured(
        "planned", "what is evicted: planned, lru, fifo, or a class, `package.module:Class`"
    )
    prefetch: Bool = honoured(True, "fetch chunks ahead of their use")
    record: Folder | None = honoured(
        None, "folder that what happens in the run is written to, for `patrickstar report`"
    )
    overlap_update: Bool = honoured(
        True, "leave an update that moves chunks to the next use of its weights; same numbers"
    )
    update_in_backward: Bool = honoured(
        False,
        "update weights while the backward that completes an accumulation runs; same numbers and "
        "less memory for gradients",
        note="`step()` must follow that backward at once; not with clipping, fp16, "
        "`bf16.check_grad_overflow` or several ranks: see [the page on it](update-in-backward.md)",
    )
    deepspeed_exact: Bool = honoured(
        False, "reproduce DeepSpeed's arithmetic, also where it has a known defect"
    )
