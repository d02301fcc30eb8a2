"""Everything about the machine at hand, measured."""

from __future__ import annotations

import os
import platform
import time
from datetime import datetime, timezone
from pathlib import Path

import torch

from patrickstar.machine.disks import measure_disk
from patrickstar.machine.facts import Disk, Machine, Processor
from patrickstar.machine.limits import memory_limit
from patrickstar.machine.rates import copy_rate, gemm_rate, update_rate

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SQUARE = ((512, 1024, 1024),)  # where a dtype is slow, a small product shows it as well


def processor_name() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def busy_seconds() -> float:
    """Processor seconds that the whole machine has spent, over all cores; 0 if it does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(int, stat.read_text().split()[1:11])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure_processor() -> Processor:
    """The processor's rates with the threads that PyTorch uses now."""
    flops = {
        str(dtype).removeprefix("torch."): gemm_rate(dtype, repeats=6)
        if dtype is not torch.float16
        else gemm_rate(dtype, repeats=3, shapes=_SQUARE)
        for dtype in _DTYPES
    }
    return Processor(
        name=processor_name(),
        flops=flops,
        copy_bytes_per_s=copy_rate(),
        update_bytes_per_s=update_rate(),
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        capability=torch.backends.cpu.get_cpu_capability(),
    )


def measure(folder: Path | None, disk_bytes: int = 1 << 30) -> Machine:
    """This machine; with the disk under `folder` if one is given. Takes seconds.

    Raises:
        ConfigError: the folder cannot be used.
    """
    began, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
    processor = measure_processor()
    disk: Disk | None = None if folder is None else measure_disk(folder, disk_bytes)
    seconds = (time.perf_counter() - began) * (os.cpu_count() or 1)
    others = busy_seconds() - busy - (time.process_time() - own)
    return Machine(
        name="this machine",
        source=f"measured with torch {torch.__version__}",
        measured=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        others=min(1.0, max(0.0, others / seconds)),
        memory_bytes=memory_limit().bytes,
        processor=processor,
        disk=disk,
    )
