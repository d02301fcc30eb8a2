"""What the machine at hand can do: the rates that a step of training cannot beat.

    python -m benchmarks.machine --disk FOLDER [--json FILE]

The measuring is `patrickstar.machine`'s, the same that `patrickstar plan` predicts with; here it is
done with a file larger than a disk's own cache. Disk rates change with what happens outside of a
virtual machine, so `run.py` measures them before and after the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from patrickstar.machine import measure
from patrickstar.machine.disks import free_bytes, mount_of
from patrickstar.machine.limits import machine_bytes


def facts(folder: str, threads: int, disk_bytes: int) -> dict[str, Any]:
    """All facts, as the results have them; rates in operations or bytes a second."""
    torch.set_num_threads(threads)
    accelerator = torch.accelerator.current_accelerator()
    machine = measure(Path(folder), disk_bytes)
    assert machine.disk is not None
    return {
        "processor": machine.processor.name,
        "cores": machine.processor.cores,
        "threads": threads,
        "memory_bytes": machine_bytes(),
        "capability": machine.processor.capability,
        "accelerator": None if accelerator is None else accelerator.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "file_system": mount_of(Path(folder))[1],
        "disk_free": free_bytes(Path(folder)),
        "gemm_flops": machine.processor.flops["bfloat16"],
        "copy_bytes_per_s": machine.processor.copy_bytes_per_s,
        "update_bytes_per_s": machine.processor.update_bytes_per_s,
        "disk": {
            "read": machine.disk.read,
            "write": machine.disk.write,
            "direct": machine.disk.direct,
            "bytes": disk_bytes,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--disk", default=".", help="a folder on the disk to measure")
    parser.add_argument("--disk-bytes", type=int, default=3 << 30, help="size of the file")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write the facts to this file")
    arguments = parser.parse_args()
    text = json.dumps(facts(arguments.disk, arguments.threads, arguments.disk_bytes), indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
