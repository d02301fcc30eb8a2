"""What management itself costs: hooks, depth, planning and start-up.

    python -m benchmarks.overheads [--threads 2] [--json FILE]

A plain loop and PatrickStar with everything in memory train the same model in one process and take
turns step by step, so that both see the same machine; medians are compared. `depth` repeats that
for a narrow model of 12 to 192 layers, where management weighs most, under a budget of half of what
it needs in memory, which has something to plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.job import Job
from benchmarks.systems.chunked import ChunkedTrainer
from benchmarks.systems.plain import PlainTrainer
from patrickstar.memory import FurthestNextUse, make_plan
from patrickstar.models import GPTConfig, preset

DEPTHS = (12, 24, 48, 96, 192)


def in_turns(config: GPTConfig, length: int, steps: int) -> dict[str, Any]:
    """Seconds of forward, backward and update of both, everything in memory."""
    job = Job("", "", length=length)
    torch.manual_seed(0)
    plain = PlainTrainer(job, config)
    torch.manual_seed(0)
    ours = ChunkedTrainer(job, config)
    generator = torch.Generator().manual_seed(1)
    try:
        for _ in range(steps + 3):
            batch = torch.randint(0, config.vocabulary, (1, length + 1), generator=generator)
            tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
            losses = [trainer.step(tokens, targets) for trainer in (plain, ours)]
            assert losses[0] == losses[1], f"the same model has the losses {losses}"
    finally:
        ours.close()
    medians = [
        {phase: statistics.median(times[3:]) for phase, times in trainer.phases.seconds.items()}
        for trainer in (plain, ours)
    ]
    return {
        "parameters": plain.parameters,
        "plain": medians[0],
        "patrickstar": medians[1],
        "hooks": _passes(medians[1]) / _passes(medians[0]) - 1,
        "step": sum(medians[1].values()) / sum(medians[0].values()),
    }


def _passes(medians: dict[str, float]) -> float:
    return medians["forward"] + medians["backward"]


def at_depth(layers: int, folder: str, steps: int) -> dict[str, Any]:
    """Seconds of a step of `layers` narrow layers, with and without a budget, and of planning."""
    config = dataclasses.replace(preset("gpt-tiny"), layers=layers)
    memory = in_turns(config, 64, steps)
    host = f"{max(6, memory['parameters'] * 8 >> 20)}MiB"
    torch.manual_seed(0)
    options = {"memory": {"host": host}, "disk": True}
    trainer = ChunkedTrainer(Job("chunked", "gpt-tiny", options, disk=folder, length=64), config)
    seconds = []
    try:
        for _ in range(steps + 2):
            batch = torch.randint(0, config.vocabulary, (1, 65))
            began = time.perf_counter()
            trainer.step(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
            seconds.append(time.perf_counter() - began)
        manager = trainer.engine.memory
        # One for steps that make their updates, one for those that leave them to the next forward.
        traces = [playback.plan.trace for playback in manager.plans.values()]
        trace = traces[-1]
        chunks = {use.chunk for moment in trace.moments for use in moment.uses}
        sizes = {chunk: manager.chunk(chunk).nbytes for chunk in chunks}
        capacities = [manager.ledger.tiers[0].capacity, None]
    finally:
        trainer.close()
    began = time.perf_counter()
    for planned in traces:
        make_plan(planned, sizes, capacities, FurthestNextUse())
    return {
        "layers": layers,
        "parameters": memory["parameters"],
        "plain_s": sum(memory["plain"].values()),
        "memory_s": sum(memory["patrickstar"].values()),
        "host": host,
        "budget_s": statistics.median(seconds[2:]),
        "traced_s": seconds[0],
        "accesses": sum(len(moment.uses) for moment in trace.moments),
        "chunks": len(chunks),
        "planning_s": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    result = {
        "gpt-25m": in_turns(preset("gpt-25m"), 512, given.steps),
        "depth": [at_depth(layers, given.disk, max(3, given.steps // 2)) for layers in DEPTHS],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
