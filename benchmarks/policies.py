"""Bytes that each policy moves for the traces of real iterations, and the least that is possible.

    python -m benchmarks.policies --model gpt-300m --host 2GiB --disk FOLDER [--json FILE]

A model is trained for one step under a budget and its trace taken. The planner then plays the trace
under several budgets with each policy, and `bound.lower_bound` says what no schedule can beat.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.bound import lower_bound
from benchmarks.job import Job
from benchmarks.systems.chunked import ChunkedTrainer
from patrickstar.memory import Fifo, FurthestNextUse, Lru, Policy, Trace, make_plan
from patrickstar.models import preset

PARTS = (0.25, 1 / 3, 0.5, 0.75)
POLICIES: dict[str, tuple[Policy, bool]] = {
    "planned": (FurthestNextUse(), True),
    "planned, no reading ahead": (FurthestNextUse(), False),
    "lru": (Lru(), False),
    "fifo": (Fifo(), False),
}


def traced(model: str, host: str, folder: str, length: int = 512) -> tuple[Trace, dict[int, int]]:
    """The trace of one training step, and the bytes of every chunk in it."""
    config = preset(model)
    options = {"memory": {"host": host}, "disk": True}
    trainer = ChunkedTrainer(Job("chunked", model, options, disk=folder, length=length), config)
    try:
        batch = torch.randint(0, config.vocabulary, (1, length + 1))
        trainer.step(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        memory = trainer.engine.memory
        (playback,) = memory.plans.values()
        trace = playback.plan.trace
        chunks = {use.chunk for moment in trace.moments for use in moment.uses}
        return trace, {chunk: memory.chunk(chunk).nbytes for chunk in chunks}
    finally:
        trainer.close()


def compare(trace: Trace, sizes: dict[int, int], part: float) -> dict[str, Any]:
    """Bytes a step of every policy with `part` of the chunks' bytes, and of the bound."""
    capacity = int(sum(sizes.values()) * part)
    moved: dict[str, int | None] = {}
    planning: dict[str, float] = {}
    for name, (policy, ahead) in POLICIES.items():
        began = time.perf_counter()
        plan = make_plan(trace, sizes, (capacity, None), policy, prefetch=ahead)
        planning[name] = time.perf_counter() - began
        fits = plan.fits((capacity, None))
        moved[name] = plan.loaded[0] + plan.saved[0] if fits else None
    try:
        bound: float | None = lower_bound(trace, sizes, capacity)
        why = None
    except (ImportError, ValueError) as error:
        bound, why = None, str(error)
    return {
        "part": part,
        "capacity": capacity,
        "moved": moved,
        "planning_s": planning,
        "bound": bound,
        "bound_missing": why,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="gpt-25m")
    parser.add_argument("--host", default="256MiB")
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    trace, sizes = traced(given.model, given.host, given.disk)
    result = {
        "model": given.model,
        "moments": len(trace.moments),
        "accesses": sum(len(moment.uses) for moment in trace.moments),
        "chunks": len(sizes),
        "bytes": sum(sizes.values()),
        "smallest": make_plan(trace, sizes, (None, None), FurthestNextUse()).smallest[0],
        "budgets": [compare(trace, sizes, part) for part in PARTS],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
