"""Tiers from budgets as people write them: `{"host": "4GiB", "disk": "/scratch"}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patrickstar.errors import ConfigError
from patrickstar.memory.sizes import parse_bytes
from patrickstar.memory.spool import Spool
from patrickstar.memory.tiers import CpuTier, DiskTier, Tier


def tiers_of(memory: Mapping[str, Any]) -> list[Tier]:
    """The tiers that `memory` asks for, the fastest first.

    Args:
        memory: `host` is a size, or None for no limit; `disk` is `"PATH"`, `"PATH:SIZE"` or
            `{"path": ..., "size": ...}`.

    Raises:
        ConfigError: another key, or no size.
        SpoolError: the folder cannot be used.
    """
    unknown = set(memory) - {"host", "disk"}
    if unknown:
        raise ConfigError(
            f"memory has no key {sorted(unknown)[0]!r}; use 'host' (a budget) and 'disk' (a folder)"
        )
    host = memory.get("host")
    tiers: list[Tier] = [CpuTier("host", None if host is None else parse_bytes(host))]
    disk = memory.get("disk")
    if disk is not None:
        tiers.append(DiskTier("disk", _spool(disk)))
    return tiers


def _spool(disk: Any) -> Spool:
    if isinstance(disk, Mapping):
        size = disk.get("size")
        return Spool(disk["path"], None if size is None else parse_bytes(size))
    path, colon, size = str(disk).rpartition(":")
    try:
        return Spool(path, parse_bytes(size)) if colon and path else Spool(str(disk))
    except ConfigError:
        return Spool(str(disk))
