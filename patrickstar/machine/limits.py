"""How much memory this process may use: the machine's, or less where a control group says so."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes, and who sets them: "machine" or the path of a control group."""

    bytes: int
    by: str


def machine_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limit(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> MemoryLimit:
    """The tightest limit on this process.

    Both versions of control groups are asked, each from this process's group upwards.
    """
    least = MemoryLimit(machine_bytes(), "machine")
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            group, name = root / path.lstrip("/"), "memory.max"
        elif "memory" in controllers.split(","):
            group, name = root / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be one that only the host can see; the root is its own.
        for place in (group, *group.parents):
            if not place.is_relative_to(root):
                break
            found = _number(place / name)
            if found is not None and found < least.bytes:
                least = MemoryLimit(found, str(place / name))
    return least


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max" is no limit
