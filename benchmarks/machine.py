"""What the machine at hand can do: the rates that a step of training cannot beat.

    python -m benchmarks.machine --disk FOLDER [--json FILE]

Every rate is the best of several tries, since a limit is what is possible: bf16 matrix products of
the shapes that a GPT of width 1024 makes of 512 tokens, a copy within memory (bytes read and bytes
written both count), and direct reads and writes of a file larger than a disk's own cache, several
requests in flight. Disk rates change with what happens outside of a virtual machine, so `run.py`
measures them before and after the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from patrickstar.memory import Spool
from patrickstar.memory.arena import PageArena
from patrickstar.memory.spool import Slot

_SHAPES = ((512, 1024, 4096), (512, 4096, 1024), (512, 1024, 3072), (2048, 2048, 2048))
_SLOT = 64 << 20


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def gemm_rate(repeats: int = 12) -> float:
    """Multiplications and additions a second in bf16 matrix products, the best of all shapes."""
    best = 0.0
    for rows, inner, columns in _SHAPES:
        left = torch.randn(rows, inner).bfloat16()
        right = torch.randn(columns, inner).bfloat16()  # a linear layer's weight
        out = torch.empty(rows, columns, dtype=torch.bfloat16)
        for _ in range(repeats):
            took = seconds_of(partial(torch.mm, left, right.t(), out=out))
            best = max(best, 2 * rows * inner * columns / took)
    return best


def copy_rate(nbytes: int = 256 << 20, repeats: int = 8) -> float:
    """Bytes a second that a copy reads and writes, together."""
    source = torch.ones(nbytes // 4)
    target = torch.empty_like(source).fill_(0)
    return max(2 * nbytes / seconds_of(lambda: target.copy_(source)) for _ in range(repeats))


def disk_rates(folder: str, nbytes: int, workers: int = 4, rounds: int = 2) -> dict[str, Any]:
    """Bytes a second of direct reads and writes of a file of `nbytes` bytes in `folder`.

    Returns:
        "read", "write": the best rate of the rounds; "direct": whether the file system let the page
        cache be bypassed; "bytes": of the file.
    """
    arena, spool = PageArena(), Spool(folder)
    try:
        slots = [spool.allocate(_SLOT) for _ in range(max(nbytes // _SLOT, workers))]
        buffers = []
        for _ in range(workers):
            buffer = arena.reserve(_SLOT)
            arena.commit(buffer, zero=True)
            buffer.tensor(torch.int64, _SLOT // 8).random_()  # nothing that compresses
            buffers.append(memoryview(buffer.tensor(torch.uint8, _SLOT).numpy().data))
        rates = {"read": 0.0, "write": 0.0}
        with ThreadPoolExecutor(workers) as pool:
            for _ in range(rounds):
                for name, call in (("write", spool.write), ("read", spool.read)):

                    def work(call: Any = call) -> None:
                        shares = [slots[worker::workers] for worker in range(workers)]
                        list(pool.map(partial(transfer, call), shares, buffers))

                    took = seconds_of(work)
                    rates[name] = max(rates[name], len(slots) * _SLOT / took)
        return {**rates, "direct": spool.direct, "bytes": len(slots) * _SLOT}
    finally:
        spool.close()


def transfer(call: Any, slots: list[Slot], buffer: memoryview) -> None:
    """One worker's part: `call` for every slot in turn."""
    for slot in slots:
        call(slot, buffer)


def processor() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def memory_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def file_system(folder: str) -> str:
    """The kind of file system that `folder` lies on."""
    best, kind = "", "unknown"
    mounts = Path("/proc/mounts")
    where = str(Path(folder).resolve())
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        _, point, found, *_ = line.split()
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind


def measure(folder: str, threads: int, disk_bytes: int) -> dict[str, Any]:
    """All facts; rates in operations or bytes a second."""
    torch.set_num_threads(threads)
    accelerator = torch.accelerator.current_accelerator()
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_bytes": memory_bytes(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "accelerator": None if accelerator is None else accelerator.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "file_system": file_system(folder),
        "gemm_flops": gemm_rate(),
        "copy_bytes_per_s": copy_rate(),
        "disk": disk_rates(folder, disk_bytes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--disk", default=".", help="a folder on the disk to measure")
    parser.add_argument("--disk-bytes", type=int, default=3 << 30, help="size of the file")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write the facts to this file")
    arguments = parser.parse_args()
    facts = measure(arguments.disk, arguments.threads, arguments.disk_bytes)
    text = json.dumps(facts, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
