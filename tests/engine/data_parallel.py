"""Runs of a few steps on several ranks, and what tests look at afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import patrickstar
from patrickstar.comm import Communicator
from patrickstar.engine.engine import Engine
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.models import GPT, GPTConfig

GLOBAL = 12  # samples of a micro-batch of all ranks: 1, 2, 3 and 4 share it equally
LENGTH = 8
TIMEOUT = 20.0

Action = Callable[[Engine, ChunkedOptimizer, int], None]


def gpt(checkpointing: Any = None, layers: int = 2) -> nn.Module:
    """Widths and a vocabulary that 2, 3 and 4 do not divide; the head is tied."""
    return GPT(GPTConfig(layers, 42, 3, 101, LENGTH, checkpointing=checkpointing))


class EqualLayers(nn.Module):
    """Layers of one square matrix each, so that their chunks are alike."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        memory: budgets; a disk gets a folder.
        no_sync: all micro-batches but the last leave their gradients on their ranks.
        shard_size: ranks that share one copy; None for all.
    """

    stage: int = 0
    precision: str = "fp32"
    memory: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    steps: int = 3
    clipping: float = 0.5
    chunk: int = 6000
    no_sync: bool = False
    shard_size: int | None = None
    checkpointing: Any = None
    optimizer: str = "AdamW"
    seed: int = 0
    deepspeed_exact: bool = False


@dataclass
class Outcome:
    """Losses and norms of every step, the weights at the end, and what it took."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: list[torch.Tensor] = field(default_factory=list)
    payload: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)

    def same_bits(self, other: Outcome) -> bool:
        return (
            self.losses == other.losses
            and self.norms == other.norms
            and self.weights.keys() == other.weights.keys()
            and all(torch.equal(w, other.weights[name]) for name, w in self.weights.items())
        )

    def assert_close(self, other: Outcome, tolerance: float) -> None:
        """Losses and norms relative to their size, weights to the largest of their tensor."""
        torch.testing.assert_close(self.losses, other.losses, rtol=tolerance, atol=0)
        torch.testing.assert_close(self.norms, other.norms, rtol=10 * tolerance, atol=0)


def config(case: Case, folder: str) -> dict[str, Any]:
    memory = dict(case.memory)
    if memory.pop("spool", False):
        memory["disk"] = {"path": folder}
    made: dict[str, Any] = {
        "train_batch_size": GLOBAL * case.accumulation,
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": {"type": case.optimizer, "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "gradient_clipping": case.clipping,
        "zero_optimization": {"stage": case.stage},
        "patrickstar": {
            "memory": memory,
            "chunk_size": case.chunk,
            "deepspeed_exact": case.deepspeed_exact,
        },
    }
    if case.precision != "fp32":
        made[case.precision] = {"enabled": True}
    return made


def decayed_and_not(module: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups, as GPTs have them."""
    return [
        {"params": [p for p in module.parameters() if p.dim() >= 2]},
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def micro_batches(case: Case) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    count = case.steps * case.accumulation
    return [torch.randint(0, 101, (GLOBAL, LENGTH), generator=draw) for _ in range(count)]


def own_rows(batch: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    rows = len(batch) // size
    return batch[rank * rows : (rank + 1) * rows]


def open_run(
    rank: int,
    size: int,
    case: Case,
    folder: str,
    provider: Callable[[], nn.Module] | None = None,
    **more: Any,
) -> tuple[Engine, ChunkedOptimizer]:
    """An engine on one of `size` ranks; its communicator is closed with it."""
    comm = None
    if size > 1:
        seconds = more.pop("timeout", TIMEOUT)
        comm = Communicator.open(timeout=seconds, shard_size=case.shard_size)
    torch.manual_seed(case.seed)
    engine, optimizer = patrickstar.initialize_engine(
        provider or (lambda: gpt(case.checkpointing)),
        {**config(case, folder), **more.pop("config", {})},
        param_groups=more.pop("param_groups", decayed_and_not),
        communicator=comm,
    )
    engine.communicator = comm
    return engine, optimizer


def train(
    rank: int,
    size: int,
    case: Case,
    between: Action | None = None,
    provider: Callable[[], nn.Module] | None = None,
    **more: Any,
) -> Outcome:
    """Train on this rank's rows of every micro-batch."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        engine, optimizer = open_run(rank, size, case, folder, provider, **more)
        try:
            engine.reset_peak()
            batches = micro_batches(case)
            for step in range(case.steps):
                total = 0.0
                for micro in range(case.accumulation):
                    rows = own_rows(batches[step * case.accumulation + micro], rank, size)
                    total += one_backward(engine, rows, case, last=micro + 1 == case.accumulation)
                if between is not None:
                    between(engine, optimizer, step)
                optimizer.step()
                optimizer.zero_grad()
                outcome.losses.append(total / case.accumulation)
                outcome.norms.append(engine.get_global_grad_norm() or 0.0)
            look(engine, outcome)
        finally:
            engine.close()
    return outcome


def one_backward(engine: Engine, rows: torch.Tensor, case: Case, *, last: bool) -> float:
    """The loss of all ranks; each has the mean over its own rows."""
    loss = engine(rows, rows.roll(-1, 1))
    if case.no_sync and not last:
        with engine.no_sync():
            engine.backward(loss)
    else:
        engine.backward(loss)
    return mean_over_ranks(engine, float(loss.detach()))


def mean_over_ranks(engine: Engine, value: float) -> float:
    if engine.ranks is None:
        return value
    comm = engine.ranks.comm
    return comm.reductions.sum([value])[0] / len(comm.topology.ranks)


def look(engine: Engine, outcome: Outcome) -> None:
    if engine.ranks is not None:
        found = engine.ranks.comm.counters.snapshot()
        outcome.payload = {name: totals.payload_bytes for name, totals in found.items()}
    report = engine.memory_report()
    outcome.peak = {name: usage.peak for name, usage in report.tiers.items()}
    outcome.moved = dict(report.moved)
    outcome.weights = {name: w.clone() for name, w in engine.state_dict().items()}
