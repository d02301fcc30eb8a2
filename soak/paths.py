"""Models that take another path at every step, and sequences of another length at every step.

Plans are made of iterations that repeat. Here hardly one does, and the losses must be those of
unlimited memory at every step all the same, inside the budget, without growing.
"""

from __future__ import annotations

import gc
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from soak.models import Batch, Spec
from soak.tally import Tally
from soak.training import config_for, fingerprint, one_step, start, warm_up
from soak.watched import resident, run_all

KINDS = ("layer drop", "early exit", "experts", "lengths")
WIDTH = 48
LIMIT = 1800.0  # seconds
MOST_GROWTH = 48 << 20  # bytes, from a quarter of the steps to the end


class Dropping(nn.Module):
    """Leaves layers out at random, or stops early."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.draw, self.early = random.Random(4), early

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.draw.randint(1, 8) if self.early else 8
        for layer in self.layers[:last]:
            if self.early or self.draw.random() < 0.6:
                x = x + torch.tanh(layer(x))
        if x.grad_fn is None:
            x = x + self.layers[0](x)
        return x.float().square().mean()


class Paths(Spec):
    """A kind of `KINDS` as a model with data."""

    def build(self) -> nn.Module:
        if self.option in ("layer drop", "early exit"):
            return Dropping(self.option == "early exit")
        return super().build()

    def batches(self, count: int, seed: int = 3) -> list[Batch]:
        if self.option != "lengths":
            return super().batches(count, seed)
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, self.length, (count,), generator=draw).tolist()
        made = [torch.randint(0, 256, (1, n + 1), generator=draw) for n in lengths]
        return [{"tokens": t[:, :-1].contiguous(), "targets": t[:, 1:].contiguous()} for t in made]


def spec_of(kind: str) -> Paths:
    if kind == "lengths":
        return Paths("gpt", WIDTH, 2, 1, 64, kind)
    if kind == "experts":
        return Paths("experts", WIDTH, 1, 2, 8)
    return Paths("layers", WIDTH, 8, 4, 4, kind)


def run(kind: str, config: dict[str, Any], steps: int, ready: Callable[[], None]) -> dict[str, Any]:
    """Train; losses, weights, and by how much the process grew after a quarter of the steps."""
    spec = spec_of(kind)
    batches = spec.batches(steps)
    ready()
    engine, optimizer = start(spec, config)
    losses, early = [], 0
    for number, batch in enumerate(batches):
        losses.append(one_step(engine, optimizer, batch))
        if number == steps // 4:
            gc.collect()
            early = resident(os.getpid()) or 0
    gc.collect()
    growth = (resident(os.getpid()) or 0) - early
    peaks = {name: usage.peak for name, usage in engine.memory_report().tiers.items()}
    weights = fingerprint(engine)
    plans = len(engine.memory.plans)
    engine.close()
    return {"losses": losses, "weights": weights, "growth": growth, "peaks": peaks, "plans": plans}


def soak(count: int, seed: int, folder: Path, workers: int) -> list[Tally]:
    """Train each kind for `count` steps."""
    warm_up(folder)
    jobs = []
    for kind in KINDS:
        free = config_for("AdamW", "fp32", 1, 0.5)
        tight = json.loads(json.dumps(free))
        numel = sum(p.numel() for p in spec_of(kind).build().parameters())
        host = 16 * numel // 2 + (600 << 10)
        disk = {"path": str(folder), "verify": True}
        tight["patrickstar"] |= {"memory": {"host": host, "disk": disk}, "chunk_size": numel // 9}
        for name, config in (("free", free), ("tight", tight)):
            jobs.append(((kind, name, host), _job(kind, config, count)))
    found = dict(run_all(jobs, workers=workers, limit=LIMIT))
    tallies = []
    for kind in KINDS:
        tally = Tally(f"steps of a model with another path each time: {kind}")
        ((_, _, host),) = [key for key in found if key[:2] == (kind, "tight")]
        tight, free = found[kind, "tight", host], found[kind, "free", host]
        if tight.error or free.error:
            tally.failed(f"{kind}: {tight.error or 'unlimited: ' + str(free.error)}")
        else:
            tally.tried = count
            same = [
                a == b for a, b in zip(tight.value["losses"], free.value["losses"], strict=True)
            ]
            if not all(same):
                tally.lost.append(f"the loss differs first at step {same.index(False)}")
            elif tight.value["weights"] != free.value["weights"]:
                tally.lost.append("the weights differ at the end")
            if tight.value["peaks"]["host"] > host:
                tally.lost.append(f"{tight.value['peaks']} with a host budget of {host}")
            if tight.value["growth"] > MOST_GROWTH:
                tally.lost.append(f"the process grew by {tight.value['growth']} bytes")
            tally.seen |= {name: tight.value[name] for name in ("growth", "plans")}
        tallies.append(tally)
    return tallies


def _job(kind: str, config: dict[str, Any], steps: int) -> Callable[[Callable[[], None]], Any]:
    return lambda ready: run(kind, config, steps, ready)
