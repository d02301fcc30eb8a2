"""An engine for tests of the command line: it trains the model plainly and claims to move bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from patrickstar.monitor import Monitor


@dataclass
class Usage:
    in_use: int
    peak: int
    budget: int | None


@dataclass
class Report:
    tiers: dict[str, Usage]
    moved: dict[str, int]


@dataclass
class FakeEngine:
    """Trains `module` with SGD. Every step moves 100 bytes, and uses `10 * step` at its peak.

    `losses`, if given, replaces the loss of each forward by a number.
    """

    module: nn.Module
    config: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    micro_batches: int = 0
    moved: int = 0
    peak: int = 500
    closed: bool = False

    def __post_init__(self) -> None:
        self.accumulation = int(self.config.get("gradient_accumulation_steps", 1))
        self.seen: list[torch.Tensor] = []
        self.monitor, self.global_samples = Monitor(), 0
        self.device = torch.device("cpu")

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.seen.append(tokens)
        loss: torch.Tensor = self.module(tokens, targets)
        if self.losses:
            loss = loss * 0 + self.losses[self.micro_batches]
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.micro_batches += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.micro_batches % self.accumulation == 0

    def mean_over_ranks(self, value: float) -> float:
        return value

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
            self.moved += 100
            self.peak = 10 * self.micro_batches

    def zero_grad(self) -> None:
        if self.is_gradient_accumulation_boundary():
            self.module.zero_grad()

    def get_global_grad_norm(self) -> float:
        return 1.5

    def get_lr(self) -> list[float]:
        return [0.1]

    def memory_report(self) -> Report:
        return Report({"host": Usage(7, self.peak, 1 << 20)}, {"host->disk": self.moved})

    def reset_peak(self) -> None:
        self.peak = 0

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeInitialize:
    """Builds a `FakeEngine`, keeps it for the test to look at, or fails with `error`."""

    losses: list[float] = field(default_factory=list)
    error: BaseException | None = None
    engine: FakeEngine | None = None

    def __call__(
        self, *, model_provider: Callable[[], nn.Module], config: dict[str, Any]
    ) -> tuple[Any, Any]:
        if self.error is not None:
            raise self.error
        self.engine = FakeEngine(model_provider(), config, self.losses)
        return self.engine, self.engine
