"""The systems that are measured, one a module. Each trains the same model on the same tokens.

A module has `load()`, which imports what the system needs (the process is weighed after it), and
`start(job, config)`, which builds the model and returns a `Trainer`.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from benchmarks.job import Job


def hyper(job: Job) -> dict[str, Any]:
    """What AdamW is given, by everybody; a list where JSON has one."""
    return {"lr": job.learning_rate, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


class Phases:
    """Seconds of the phases of a step: each `mark` ends one."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}
        self._last = 0.0

    def start(self) -> None:
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase].append(now - self._last)
        self._last = now


class Trainer(Protocol):
    """A model in training."""

    parameters: int
    phases: Phases

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """Forward, backward and update, marked in `phases`; returns the loss.

        Both are int64 [sequences, length].
        """
        ...

    def moved(self) -> dict[str, int]:
        """Bytes moved so far between tiers, by "from->to", where the system counts them."""
        ...

    def notes(self) -> dict[str, Any]:
        """What it says about how it was set."""
        ...

    def close(self) -> None: ...
