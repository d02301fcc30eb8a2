"""Engines come and go without a trace in the process."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from pathlib import Path

import pytest

from patrickstar.engine.initialize import make_engine

from .test_training import MIB, Mlp, numbers
from .training import settings


def use_one(folder: Path, *, close: bool) -> weakref.ref[object]:
    how = settings(precision="bf16", device=MIB, host=MIB, disk=folder, chunk=9000)
    engine, optimizer = make_engine(Mlp, how)
    for batch in numbers(2, 4, 64):
        engine.backward(engine(**batch))
        optimizer.step()
        optimizer.zero_grad()
    if close:
        engine.close()
    return weakref.ref(engine.memory)


def held() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_engines_leave_no_handles_threads_or_memory_behind(close: bool, tmp_path: Path) -> None:
    use_one(tmp_path, close=close)
    gc.collect()
    before = held()
    managers = [use_one(tmp_path, close=close) for _ in range(4)]
    gc.collect()
    patience = time.monotonic() + 10
    while held() > before and time.monotonic() < patience:
        time.sleep(0.01)  # threads without a manager end by themselves, but not at once
    assert held() <= before
    assert [manager() for manager in managers] == [None] * 4
