"""Managers come and go without a trace in the process."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from patrickstar.memory import Access, ChunkManager, CpuTier, DiskTier, Spool, Use

MIB = 1 << 20


def resources() -> tuple[int, int, int]:
    """Threads, file handles and mappings of this process."""
    with open("/proc/self/maps") as maps:
        mappings = sum(1 for _ in maps)
    return threading.active_count(), len(os.listdir("/proc/self/fd")), mappings


def rss() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work(folder: Path, *, close: bool) -> None:
    tiers = [
        CpuTier("device", MIB // 2),
        CpuTier("host", MIB),
        DiskTier("disk", Spool(folder)),
    ]
    manager = ChunkManager(tiers)
    chunks = [manager.create(MIB // 32, torch.float32) for _ in range(12)]  # 128 KiB each
    views = [manager.tensor(chunk)[:10] for chunk in chunks]
    for chunk, view in zip(chunks, views, strict=True):
        manager.keep_view(chunk, view)
    for _ in range(2):
        manager.begin_iteration("same")
        for chunk in chunks:
            with manager.use([Use(chunk.id, Access.UPDATE)]):
                manager.tensor(chunk).add_(1)
        manager.end_iteration()
    if close:
        manager.close()


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_fifty_managers_leave_nothing_behind(tmp_path: Path, close: bool) -> None:
    for _ in range(5):
        work(tmp_path, close=close)
    gc.collect()
    before, held = resources(), rss()
    for _ in range(50):
        work(tmp_path, close=close)
    gc.collect()
    patience = time.monotonic() + 10
    while threading.active_count() > before[0] and time.monotonic() < patience:
        time.sleep(0.01)  # threads without a manager end by themselves, but not at once
    after = resources()
    assert after[0] <= before[0], "threads"
    assert after[1] <= before[1], "file handles"
    assert after[2] <= before[2] + 20, "mappings; the heap may have grown by a few"
    assert rss() - held < 8 * MIB, "50 managers had 75 MiB between them"
    assert list(tmp_path.iterdir()) == []


def test_an_iteration_leaves_nothing_behind_either(tmp_path: Path) -> None:
    manager = ChunkManager([CpuTier("host", MIB), DiskTier("disk", Spool(tmp_path))])
    chunks = [manager.create(MIB // 32, torch.float32) for _ in range(20)]

    def iterate() -> None:
        manager.begin_iteration("same")
        for chunk in chunks:
            with manager.use([Use(chunk.id, Access.UPDATE)]):
                manager.tensor(chunk).add_(1)
        manager.end_iteration()

    for _ in range(100):
        iterate()
    gc.collect()
    before, objects = resources(), len(gc.get_objects())
    grown = []  # a leak grows every time; what else the process does grows once
    while len(grown) < 4 and min(grown, default=4 * MIB) >= 4 * MIB:
        held = rss()
        for _ in range(100):
            iterate()
        gc.collect()
        grown.append(rss() - held)
    assert resources()[0] <= before[0] + 1, "the second transfer thread may start only now"
    assert resources()[1] <= before[1]
    assert resources()[2] <= before[2] + 20
    assert len(gc.get_objects()) <= objects + 20
    assert min(grown) < 4 * MIB
    manager.close()
