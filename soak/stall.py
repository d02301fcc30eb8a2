"""How much asynchronous saving slows training down: at most 5% of the time of the steps.

The same steps with and without saves in the background, in turns, in processes of their own; the
best of each counts, since whatever else runs on the machine only ever adds time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soak.models import Spec
from soak.tally import Tally
from soak.training import config_for, one_step, start, warm_up
from soak.watched import run_all

SPEC = Spec("gpt", 256, 6, 4, 128)
STEPS, EVERY = 40, 20
MOST = 0.05
LIMIT = 600.0  # seconds


def seconds(folder: Path | None, ready: Callable[[], None]) -> float:
    """The time of `STEPS` steps; with a folder there is a save after every `EVERY`."""
    config: dict[str, Any] = config_for("AdamW", "bf16", 1, 1.0)
    engine, optimizer = start(SPEC, config)
    batches = SPEC.batches(STEPS + 3)
    for batch in batches[:3]:
        one_step(engine, optimizer, batch)
    ready()
    began = time.perf_counter()
    for number, batch in enumerate(batches[3:]):
        if folder is not None and number % EVERY == 0:
            engine.save_checkpoint(folder, keep=1, asynchronous=True)
        one_step(engine, optimizer, batch)
    took = time.perf_counter() - began
    engine.close()
    return took


def soak(count: int, seed: int, folder: Path, workers: int) -> list[Tally]:
    """Measure `count` times each."""
    warm_up(folder / "warm")
    tally = Tally(f"asynchronous saves every {EVERY} steps: at most {MOST:.0%} slower")
    jobs = []
    for number in range(count):
        jobs.append((("without", number), lambda ready: seconds(None, ready)))
        jobs.append((("with", number), lambda ready: seconds(folder / "runs", ready)))
    best: dict[str, float] = {}
    for (kind, _), outcome in run_all(jobs, workers=1, limit=LIMIT):
        if outcome.error is not None:
            tally.failed(outcome.error)
            return [tally]
        best[kind] = min(best.get(kind, outcome.value), outcome.value)
    slower = best["with"] / best["without"] - 1
    tally.tried = count
    tally.seen["percent slower"] = round(100 * slower, 2)
    if slower > MOST:
        tally.lost.append(f"{slower:.1%} slower: {best}")
    return [tally]
