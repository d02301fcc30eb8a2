"""Checks of the machine: processors, memory, accelerators, pinned memory, disk.

What is judged is passed in, so that the judgement can be tried with machines that are not there.
The thresholds are where the advice begins to pay: a quarter of the speed lost is worth a line.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from patrickstar.machine.check import Check, State
from patrickstar.machine.disks import IN_MEMORY, OVER_A_NETWORK
from patrickstar.machine.facts import Disk, Processor
from patrickstar.machine.limits import MemoryLimit
from patrickstar.memory.pinned import Lock, PinnedTier
from patrickstar.memory.sizes import format_bytes

_LOST = 0.75  # of the speed that could be had: less is said
_OTHERS = 0.2  # of the processors, used by other programs
_SCARCE = 0.25  # of the memory left: what others hold will be missed
_SLOW_DISK = 1e9  # bytes a second; a SATA disk is half of it
_STATE = 16  # bytes a parameter, in bf16 with AdamW
_LOCKED = 64 << 20  # bytes of pinned memory to try


def check_processors(processor: Processor, usable: float, total: int, others: float = 0.0) -> Check:
    """Threads against what may be used, and the rates of matrix products.

    Args:
        usable: processors that this process may keep busy, of `total`.
        others: part of the processors that other programs used while the rates were measured.
    """
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in processor.flops.items())
    threads = processor.threads or total
    found = (
        f"{processor.name}, {usable:g} of {total} usable, {threads} threads"
        + (f", {processor.capability}" if processor.capability else "")
        + f"; matrix products in GFLOP/s: {rates}; copies {_rate(processor.copy_bytes_per_s)}"
    )
    if threads > usable:
        return Check(
            "processors", State.SLOW, found,
            f"{threads} threads share {usable:g} processors and wait for each other",
            f"set OMP_NUM_THREADS={max(1, int(usable))}",
        )  # fmt: skip
    if 2 * threads < usable:  # half of them may be the second threads of cores
        return Check(
            "processors", State.SLOW, found,
            f"PyTorch uses {threads} of {usable:g} processors",
            "unset OMP_NUM_THREADS, unless several ranks run on this machine",
        )  # fmt: skip
    narrow, wide = processor.flops.get("bfloat16"), processor.flops.get("float32")
    if narrow is not None and wide is not None and narrow < _LOST * wide:
        return Check(
            "processors", State.SLOW, found,
            f"matrix products in bf16 are {wide / narrow:.1f} times slower than in fp32: these "
            "processors have no instructions for them",
            'train in fp32 (leave "bf16" out of the config); state takes 16 bytes a weight in both',
        )  # fmt: skip
    if others > _OTHERS:
        return Check(
            "processors", State.SLOW, found,
            f"other programs used {others:.0%} of the processors meanwhile",
            "stop them, or expect steps that are as much slower",
        )  # fmt: skip
    return Check("processors", State.FINE, found)


def check_memory(limit: MemoryLimit, total: int, available: int | None) -> Check:
    """What this process may have, and what of it is left.

    Args:
        limit: the tightest on this process.
        total: of the machine.
        available: without swapping; None if unknown.
    """
    left = limit.bytes if available is None else min(available, limit.bytes)
    by = "" if limit.by == "machine" else f", limited by {limit.by} (the machine has "
    by += f"{format_bytes(total)})" if by else ""
    found = f"{format_bytes(left)} free of {format_bytes(limit.bytes)}{by}"
    advice = f"a host budget of {format_bytes(int(left * 0.9))} leaves room for the rest"
    if left < _SCARCE * limit.bytes:
        return Check(
            "memory", State.SLOW, found,
            "other programs hold most of it; a budget beyond what is free makes the system swap",
            advice,
        )  # fmt: skip
    return Check("memory", State.FINE, f"{found}; {advice}")


@dataclass(frozen=True)
class Device:
    """An accelerator: its index, name, and bytes of memory."""

    index: int
    name: str
    free: int
    total: int


def accelerators() -> tuple[str | None, list[Device]]:
    """The type of accelerator that PyTorch finds, and the devices of it."""
    there = torch.accelerator.current_accelerator(check_available=True)
    if there is None:
        return None, []
    found = []
    for index in range(torch.accelerator.device_count()):
        device = torch.device(there.type, index)
        free, total = torch.accelerator.get_memory_info(device)
        module = torch.get_device_module(device)
        name = module.get_device_name(index) if hasattr(module, "get_device_name") else there.type
        found.append(Device(index, name, free, total))
    return there.type, found


def check_accelerators(kind: str | None, devices: list[Device]) -> Check:
    """What forward and backward run on."""
    if kind is None or not devices:
        return Check(
            "accelerators", State.MISSING, "none",
            "forward and backward run on the processors",
            "nothing, if this machine has none; otherwise see what torch was built for, above",
        )  # fmt: skip
    found = ", ".join(
        f"{kind}:{d.index} {d.name} ({format_bytes(d.free)} free of {format_bytes(d.total)})"
        for d in devices
    )
    full = [f"{kind}:{d.index}" for d in devices if d.free < _SCARCE * d.total]
    if full:
        return Check(
            "accelerators", State.SLOW, found,
            f"other programs hold most of the memory of {', '.join(full)}",
            "stop them, or set patrickstar.memory.device to what is free",
        )  # fmt: skip
    return Check("accelerators", State.FINE, found)


def check_pinned(
    kind: str | None,
    lock: Lock | None = None,
    link: Callable[[], float] | None = None,
    locked_limit: int | None = None,
) -> Check:
    """Whether pages can be locked for an accelerator, and how fast it copies from them.

    Args:
        lock: locks pages; None without an accelerator.
        link: measures bytes a second from locked memory to the device.
        locked_limit: bytes that the system lets this process lock; None for any.
    """
    limit = "" if locked_limit is None else f", at most {format_bytes(locked_limit)} by ulimit -l"
    if kind is None or lock is None:
        return Check("pinned memory", State.FINE, "not needed without an accelerator")
    tier = PinnedTier("host", None, lock)
    try:
        tier.take(0, _LOCKED, zero=False)
        tier.give_back(0)
    except Exception as error:  # whatever a driver raises
        return Check(
            "pinned memory", State.FAILS, f"{format_bytes(_LOCKED)} cannot be locked{limit}",
            f"the host tier of a run with an accelerator lies in locked pages ({error})",
            "raise the limit (`ulimit -l unlimited`, or --ulimit memlock=-1 for a container)",
        )  # fmt: skip
    finally:
        tier.close()
    rate = "" if link is None else f", copied to the device at {_rate(link())}"
    return Check("pinned memory", State.FINE, f"{format_bytes(_LOCKED)} locked{rate}{limit}")


def link_rate(device: torch.device, nbytes: int = 256 << 20, repeats: int = 4) -> float:
    """Bytes a second from pinned memory to `device`, the best of several copies."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(repeats):
        torch.accelerator.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize(device)
        best = max(best, nbytes / (time.perf_counter() - began))
    return best


def check_disk(disk: Disk, free: int) -> Check:
    """The disk that chunks would go to.

    Args:
        free: its free bytes.
    """
    direct = "direct" if disk.direct else "through the page cache"
    found = (
        f"{disk.folder}, {disk.kind}, {format_bytes(free)} free; reads {_rate(disk.read)}, "
        f"writes {_rate(disk.write)}, {direct}"
    )
    kind = disk.kind or ""
    if kind in IN_MEMORY:
        return Check(
            "disk", State.SLOW, found,
            f"{kind} lies in the host's memory: what goes there saves none of it",
            "give --disk a folder on a real disk",
        )  # fmt: skip
    if kind in OVER_A_NETWORK:
        return Check(
            "disk", State.SLOW, found, f"{kind} is behind a network, shared with others",
            "give --disk a folder on a local disk (NVMe)",
        )  # fmt: skip
    if not disk.direct:
        return Check(
            "disk", State.SLOW, found,
            f"{kind} takes no direct I/O: every byte is copied once more and fills the page cache",
            "give --disk a folder on ext4 or xfs",
        )  # fmt: skip
    if min(disk.read, disk.write) < _SLOW_DISK:
        seconds = 1e9 * _STATE / 2 * (1 / disk.read + 1 / disk.write)
        return Check(
            "disk", State.SLOW, found,
            f"of a model of 1B parameters, half of whose state goes there and back, a step takes "
            f"{seconds:.0f} s for the disk alone",
            "use an NVMe disk, or a budget that leaves little for it (`patrickstar plan` says)",
        )  # fmt: skip
    return Check("disk", State.FINE, found)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
