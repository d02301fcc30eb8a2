"""How much memory and how many processors this process may use.

They are the machine's, or less where a control group says so. Both versions of control groups are
asked, each from this process's group upwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes, and who sets them: "machine" or the path of a control group."""

    bytes: int
    by: str


def machine_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that programs can have now without swapping; None if the system does not say."""
    for line in meminfo.read_text().splitlines() if meminfo.exists() else []:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def memory_limit(root: Path = _ROOT, own: Path = _OWN) -> MemoryLimit:
    """The tightest limit on this process."""
    least = MemoryLimit(machine_bytes(), "machine")
    for group, version in _groups("memory", root, own):
        file = group / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        found = _number(_text(file))
        if found is not None and found < least.bytes:
            least = MemoryLimit(found, str(file))
    return least


def usable_processors(root: Path = _ROOT, own: Path = _OWN) -> float:
    """Processors that this process may keep busy: those it may run on, or a group's share."""
    least = float(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        least = min(least, len(os.sched_getaffinity(0)))
    for group, version in _groups("cpu", root, own):
        if version == 2:
            quota, _, period = _text(group / "cpu.max").partition(" ")
        else:
            quota = _text(group / "cpu.cfs_quota_us")
            period = _text(group / "cpu.cfs_period_us")
        share, of = _number(quota), _number(period)
        if share and of:
            least = min(least, share / of)
    return least


def _groups(controller: str, root: Path, own: Path) -> Iterator[tuple[Path, int]]:
    """This process's groups of `controller` and those above them, with their version."""
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            group, version = root / path.lstrip("/"), 2
        elif controller in controllers.split(","):
            group, version = root / controller / path.lstrip("/"), 1
        else:
            continue
        # In a container the path may be one that only the host can see; the root is its own.
        for place in (group, *group.parents):
            if not place.is_relative_to(root):
                break
            yield place, version


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None  # "max" and -1 are no limits
