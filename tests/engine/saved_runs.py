"""Runs that are saved and resumed, and everything there is to compare of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from patrickstar.engine.engine import Engine
from patrickstar.engine.initialize import RunSettings, make_engine
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.memory import Access, Use

from .test_training import MIB, Mlp
from .training import loss_of, settings

Provider = Callable[[], nn.Module]


class Noisy(Mlp):
    """With dropout, a buffer that training changes, a frozen, and a seldom used parameter."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__(width=32, depth=2)
        self.norm = nn.BatchNorm1d(32)
        self.frozen = nn.Linear(32, 32)
        self.frozen.requires_grad_(False)
        self.seldom = nn.Linear(32, 32)
        self.never = nn.Parameter(torch.ones(7))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = nn.functional.dropout(self.frozen(self.norm(x)), 0.2)
        if int(self.calls) % 3 == 0:
            x = x + self.seldom(x)
        return super().forward(x)


def engine_for(provider: Provider, how: RunSettings) -> tuple[Engine, ChunkedOptimizer]:
    torch.manual_seed(0)
    return make_engine(provider, how)


def train(engine: Engine, optimizer: ChunkedOptimizer, batches: Any) -> list[float]:
    losses = []
    for batch in batches:
        loss = loss_of(engine(**batch))
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything(engine: Engine) -> dict[str, Any]:
    """Weights, masters and moments by name, and the counters."""
    state = engine._state
    found: dict[str, Any] = {k: v.clone() for k, v in engine.state_dict().items()}
    for aligned in state.aligned:
        for chunk in aligned.chunks():
            if chunk.kind in ("parameter", "gradient"):
                continue
            with state.manager.use([Use(chunk.id, Access.READ, state.update_tier)]):
                flat = state.manager.tensor(chunk, state.update_tier)
                for slot in aligned.slots:
                    values = flat[slot.offset : slot.offset + slot.numel]
                    found[f"{chunk.kind} of {slot.name}"] = values.clone()
    for _, slot in state.slots.values():
        found[f"step of {slot.name}"] = slot.step
    for key in ("global_steps", "micro_steps", "skipped_steps"):
        found[key] = getattr(engine, key)
    found["lr"] = engine.get_lr()
    return found


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        same = torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else None
        assert same if same is not None else value == theirs[key], key


def through(provider: Provider, how: RunSettings, batches: Any) -> tuple[list[float], Any]:
    engine, optimizer = engine_for(provider, how)
    try:
        return train(engine, optimizer, batches), everything(engine)
    finally:
        engine.close()


def resumed(
    provider: Provider,
    how: RunSettings,
    batches: Any,
    after: int,
    folder: Path,
    then: RunSettings | None = None,
) -> tuple[list[float], Any]:
    """Train `after` batches, save, forget everything, load into another engine and go on."""
    engine, optimizer = engine_for(provider, how)
    losses = train(engine, optimizer, batches[:after])
    engine.save_checkpoint(folder, client_state={"epoch": (1, 2)})
    engine.close()
    torch.manual_seed(99)
    random.seed(99)
    numpy.random.seed(99)
    engine, optimizer = make_engine(provider, then or how)
    try:
        path, client = engine.load_checkpoint(folder)
        assert path == str(folder / f"global_step{engine.global_steps}")
        assert client == {"epoch": (1, 2)}
        return losses + train(engine, optimizer, batches[after:]), everything(engine)
    finally:
        engine.close()


def budgets(tmp_path: Path, **how: Any) -> list[RunSettings]:
    return [
        settings(chunk=9000, **how),
        settings(host=1 * MIB, disk=tmp_path, chunk=9000, **how),
        settings(device=int(0.9 * MIB), host=1 * MIB, disk=tmp_path, chunk=9000, **how),
        settings(
            device=int(0.9 * MIB), host=2 * MIB, disk=tmp_path, chunk=9000, accelerator=True, **how
        ),
    ]


class Reader:
    """A position in some data."""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
