"""How much memory the process really has, as the system counts it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_resident() -> int:
    """The highest resident set size of this process so far, in bytes.

    On Linux from VmHWM, since ru_maxrss also counts what the process was before `exec`.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
