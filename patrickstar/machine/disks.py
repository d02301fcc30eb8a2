"""What lies under a folder, and how fast: measured with the spool that training uses."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

from patrickstar.errors import ConfigError
from patrickstar.machine.facts import Disk
from patrickstar.machine.rates import seconds_of
from patrickstar.memory import Spool
from patrickstar.memory.arena import PageArena
from patrickstar.memory.spool import Slot
from patrickstar.memory.transfer import AT_ONCE
from patrickstar.workers import Workers

SLOT = 64 << 20
IN_MEMORY = ("tmpfs", "ramfs")
OVER_A_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "lustre")


def standing(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that is there already.

    Raises:
        ConfigError: what is there is no folder.
    """
    here = folder.expanduser().absolute()
    while not here.exists() and here != here.parent:
        here = here.parent
    if not here.is_dir():
        raise ConfigError(f"{str(folder)!r} is no folder; give a folder on the disk to use")
    return here


def free_bytes(folder: Path) -> int:
    """Bytes that the disk under `folder` has free."""
    return shutil.disk_usage(standing(folder)).free


def mount_of(folder: Path, mounts: Path = Path("/proc/mounts")) -> tuple[str, str, str]:
    """Where the file system under `folder` is mounted, its kind, and its device."""
    best = ("", "unknown", "")
    where = str(standing(folder).resolve())
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        device, point, kind, *_ = line.split()
        point = point.encode().decode("unicode_escape")  # a space is \040
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, kind, device)
    return best


def measure_disk(
    folder: Path, nbytes: int = 1 << 30, workers: int = AT_ONCE, rounds: int = 2
) -> Disk:
    """The best rates of direct writes and reads of a file of `nbytes` bytes; it is gone afterwards.

    Made as training makes them: as many at once, and with their checksums. Some disks are faster
    with more at once and others slower, so other numbers would say nothing about a step.

    Raises:
        ConfigError: the folder cannot be written, or has no room for the file.
    """
    place = standing(folder)
    count = max(nbytes // SLOT, workers)
    if free_bytes(place) < count * SLOT:
        raise ConfigError(
            f"{str(folder)!r} has less than {count * SLOT >> 20} MiB free, which measuring its "
            "disk takes; make room or choose another folder"
        )
    try:
        spool = Spool(place)
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} cannot be written ({error.strerror})") from error
    arena = PageArena()
    try:
        slots = [spool.allocate(SLOT) for _ in range(count)]
        buffers = []
        for _ in range(workers):
            buffer = arena.reserve(SLOT)
            arena.commit(buffer, zero=True)
            buffer.tensor(torch.int64, SLOT // 8).random_()  # nothing that compresses
            buffers.append(memoryview(buffer.tensor(torch.uint8, SLOT).numpy().data))
        rates = {"read": 0.0, "write": 0.0}
        with Workers(workers, "patrickstar-disk") as threads:
            for _ in range(rounds):
                for name, call in (("write", spool.write), ("read", spool.read)):

                    def work(call: Any = call) -> None:
                        shares = [slots[worker::workers] for worker in range(workers)]
                        tasks = [
                            threads.start(partial(_transfer, call, share, buffer))
                            for share, buffer in zip(shares, buffers, strict=True)
                        ]
                        for task in tasks:
                            task.wait()

                    rates[name] = max(rates[name], count * SLOT / seconds_of(work))
        return Disk(
            read=rates["read"],
            write=rates["write"],
            folder=str(place),
            kind=mount_of(place)[1],
            direct=spool.direct,
            size_bytes=free_bytes(place) or None,
        )
    finally:
        spool.close()


def _transfer(call: Any, slots: list[Slot], buffer: memoryview) -> None:
    """One worker's part: `call` for every slot in turn."""
    for slot in slots:
        call(slot, buffer)
