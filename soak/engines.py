"""Engines that are made, used and gone, again and again: nothing of them may stay.

Memory, file handles and threads of the process are compared after some first engines, which load
what is loaded once, and at the end.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
from pathlib import Path
from typing import Any

from soak.models import Spec
from soak.tally import Tally
from soak.training import config_for, one_step, start, warm_up
from soak.watched import resident

FIRST = 24  # engines that may load something for good
MOST_GROWTH = 12 << 20  # bytes for all others together; what each holds is several times that


def held() -> dict[str, int]:
    """What this process holds now, without the free pages of the C library's heap."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return {
        "bytes": resident(os.getpid()) or 0,
        "file handles": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
    }


def one_engine(number: int, folder: Path, draw: random.Random) -> None:
    """Make an engine, train two steps, save now and then, and be done with it."""
    spec = Spec(draw.choice(["layers", "gpt"]), 64, 3, 2)
    config = config_for("AdamW", draw.choice(["fp32", "bf16"]))
    memory: dict[str, Any] = {"host": 4 << 20, "disk": {"path": str(folder / "spool")}}
    if number % 3 == 0:
        memory["device"] = 4 << 20
    config["patrickstar"] |= {"memory": memory, "chunk_size": 20_000}
    if number % 5 == 0:
        config["patrickstar"]["record"] = str(folder / "record")
    engine, optimizer = start(spec, config)
    for batch in spec.batches(2):
        one_step(engine, optimizer, batch)
    if number % 4 == 0:
        engine.save_checkpoint(folder / "runs", keep=1, asynchronous=number % 8 == 0)
    if number % 2:
        engine.close()  # the others are just dropped
    else:
        engine.wait_for_checkpoint()
    del engine, optimizer
    gc.collect()


def soak(count: int, seed: int, folder: Path, workers: int) -> list[Tally]:
    """Make `count` engines."""
    warm_up(folder)
    tally = Tally("engines made and gone; memory, handles and threads as before")
    draw = random.Random(seed)
    for number in range(FIRST):
        one_engine(number, folder, draw)
    before = held()
    for number in range(count):
        one_engine(number, folder, draw)
        tally.survived()
    after = held()
    growth = {name: after[name] - before[name] for name in before}
    tally.seen |= {f"more {name}": value for name, value in growth.items()}
    if growth["bytes"] > MOST_GROWTH or any(growth[n] > 0 for n in growth if n != "bytes"):
        tally.lost.append(f"{count} engines left {growth}")
    return [tally]
