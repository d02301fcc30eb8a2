"""The training loop of the command line, and what it measures at every step.

It is the loop that a user would write: forward, backward, step, zero_grad. A step is an optimizer
step; with gradient accumulation it has several micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from patrickstar.errors import PatrickStarError
from patrickstar.monitor import Monitor


class DivergedError(PatrickStarError, ArithmeticError):
    """The loss is no longer a finite number."""


class TierUsage(Protocol):
    """Bytes in use now, at most since the last reset, and allowed (None: unlimited)."""

    @property
    def in_use(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def budget(self) -> int | None: ...


class MemoryReport(Protocol):
    """Usage by tier, and bytes moved so far by "from->to"."""

    @property
    def tiers(self) -> Mapping[str, TierUsage]: ...
    @property
    def moved(self) -> Mapping[str, int]: ...


class Trainable(Protocol):
    """What the loop asks of an engine."""

    @property
    def device(self) -> torch.device: ...
    @property
    def monitor(self) -> Monitor: ...
    @property
    def global_samples(self) -> int: ...
    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any: ...
    def backward(self, loss: torch.Tensor) -> Any: ...
    def is_gradient_accumulation_boundary(self) -> bool: ...
    def get_global_grad_norm(self) -> float | None: ...
    def get_lr(self) -> list[float]: ...
    def mean_over_ranks(self, value: float) -> float: ...
    def memory_report(self) -> MemoryReport: ...
    def reset_peak(self) -> None: ...
    def close(self) -> None: ...


class Steps(Protocol):
    """What the loop asks of an optimizer."""

    def step(self) -> Any: ...
    def zero_grad(self) -> Any: ...


class Initialize(Protocol):
    """Builds an engine and its optimizer; `patrickstar.initialize_engine` is one."""

    def __call__(
        self, *, model_provider: Callable[[], nn.Module], config: dict[str, Any]
    ) -> tuple[Trainable, Steps]: ...


class BatchSource(Protocol):
    """Batches by number: tokens and targets, int64 [batch, length]."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step: a line of the metrics file, with the names it has there.

    Attributes:
        step: counted from 1.
        loss: mean over the step's micro-batches, of all ranks.
        lr: the learning rate that the step was made with, of the first parameter group.
        grad_norm: before clipping; None if it is unknown, or infinite as in a skipped fp16 step.
        step_time_s: seconds.
        tokens_per_s: tokens a second, of all ranks.
        peak_bytes: by tier, in this step, on this rank.
        moved_bytes: by "from->to", in this step, on this rank.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    step_time_s: float
    tokens_per_s: float
    peak_bytes: dict[str, int]
    moved_bytes: dict[str, int]


def training_steps(
    engine: Trainable,
    optimizer: Steps,
    batches: BatchSource,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[StepMetrics]:
    """Train for `steps` optimizer steps, one for every item drawn.

    Args:
        rank, world_size: the batches are dealt out to ranks in turn.

    Raises:
        DivergedError: a loss is infinite or not a number; that step was not made.
    """
    micro_batch = 0
    moved = dict(engine.memory_report().moved)
    for step in range(1, steps + 1):
        engine.reset_peak()
        began = clock()
        losses: list[float] = []
        tokens = 0
        while True:
            inputs, targets = batches[micro_batch * world_size + rank]
            micro_batch += 1
            tokens += inputs.numel() * world_size
            loss = engine(inputs.to(engine.device), targets.to(engine.device))
            losses.append(engine.mean_over_ranks(loss.item()))
            if not math.isfinite(losses[-1]):
                raise DivergedError(
                    f"the loss is {losses[-1]} at step {step}, so training stopped before that "
                    "step's update. Lower the learning rate (--learning-rate), warm up for longer, "
                    "or clip gradients (gradient_clipping in the config)"
                )
            lr = engine.get_lr()[0]
            engine.backward(loss)
            del loss  # and with it the graph, before the step needs the room
            complete = engine.is_gradient_accumulation_boundary()
            optimizer.step()
            optimizer.zero_grad()
            if complete:
                break
        seconds = clock() - began
        report = engine.memory_report()
        before, moved = moved, dict(report.moved)
        norm = engine.get_global_grad_norm()
        yield StepMetrics(
            step=step,
            loss=sum(losses) / len(losses),
            lr=lr,
            grad_norm=norm if norm is not None and math.isfinite(norm) else None,
            step_time_s=seconds,
            tokens_per_s=tokens / seconds,
            peak_bytes={name: usage.peak for name, usage in report.tiers.items()},
            moved_bytes={pair: n - before.get(pair, 0) for pair, n in moved.items()},
        )
