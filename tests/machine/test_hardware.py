"""What a machine is judged to be; most of these are not at hand."""

from __future__ import annotations

from typing import Any

import pytest

from patrickstar.machine import Disk, Processor, hardware
from patrickstar.machine.check import State
from patrickstar.machine.hardware import Device
from patrickstar.machine.limits import MemoryLimit


def processor(threads: int = 4, bfloat16: float = 2e12) -> Processor:
    flops = {"float32": 1e12, "bfloat16": bfloat16}
    return Processor(name="p", flops=flops, copy_bytes_per_s=1e10, threads=threads)


@pytest.mark.parametrize(
    ("given", "usable", "others", "named"),
    [
        (processor(), 4, 0.0, None),
        (processor(), 8, 0.0, None),  # the second threads of cores
        (processor(threads=8), 2, 0.0, "OMP_NUM_THREADS=2"),
        (processor(threads=1), 4, 0.0, "unset OMP_NUM_THREADS"),
        (processor(bfloat16=1e11), 4, 0.0, "fp32"),
        (processor(), 4, 0.5, "stop them"),
    ],
)
def test_processors_are_slow_for_a_reason_that_is_told(
    given: Processor, usable: float, others: float, named: str | None
) -> None:
    check = hardware.check_processors(given, usable, 8, others)
    assert check.state is (State.FINE if named is None else State.SLOW)
    assert (named or "") in check.advice


def test_memory_that_others_hold_is_told_with_a_budget_that_is_left() -> None:
    limit = MemoryLimit(8 << 30, "/sys/fs/cgroup/memory.max")
    check = hardware.check_memory(limit, 64 << 30, 1 << 30)
    assert check.state is State.SLOW
    assert "the machine has 64.00 GiB" in check.found
    assert "921.60 MiB" in check.advice
    assert hardware.check_memory(limit, 64 << 30, 40 << 30).state is State.FINE
    assert hardware.check_memory(limit, 64 << 30, None).state is State.FINE


def test_accelerators_are_listed_and_a_full_one_is_named() -> None:
    assert hardware.check_accelerators(None, []).state is State.MISSING
    two = [Device(0, "G", 70 << 30, 80 << 30), Device(1, "G", 1 << 30, 80 << 30)]
    check = hardware.check_accelerators("cuda", two)
    assert check.state is State.SLOW
    assert "cuda:1" in check.why and "cuda:0" not in check.why
    assert hardware.check_accelerators("cuda", two[:1]).state is State.FINE


def test_pages_that_cannot_be_locked_fail_and_those_that_can_are_unlocked_again() -> None:
    locked: list[int] = []

    def lock(address: int, nbytes: int) -> Any:
        locked.append(nbytes)
        return lambda: locked.remove(nbytes)

    def refuse(address: int, nbytes: int) -> Any:
        raise RuntimeError("out of memory")

    fine = hardware.check_pinned("cuda", lock, lambda: 2e10, 64 << 20)
    assert fine.state is State.FINE
    assert "20.00 GB/s" in fine.found and "ulimit -l" in fine.found
    assert locked == []
    fails = hardware.check_pinned("cuda", refuse, None, 8 << 20)
    assert fails.state is State.FAILS
    assert "out of memory" in fails.why and "8.00 MiB" in fails.found
    assert hardware.check_pinned(None).state is State.FINE


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"kind": "tmpfs"}, "host's memory"),
        ({"kind": "nfs4"}, "network"),
        ({"direct": False}, "page cache"),
        ({"write": 5e8}, "takes 24 s"),  # 8 GB at 1 GB/s and at 0.5 GB/s
    ],
)
def test_a_disk_is_slow_for_a_reason_that_is_told(
    changes: dict[str, Any], named: str | None
) -> None:
    disk = Disk(**{"read": 1e9, "write": 2e9, "folder": "/x", "kind": "ext4", **changes})
    check = hardware.check_disk(disk, 1 << 40)
    assert check.state is (State.FINE if named is None else State.SLOW)
    assert (named or "") in check.why
