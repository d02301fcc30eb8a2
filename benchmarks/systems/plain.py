"""An ordinary PyTorch loop: bf16 weights, fp32 masters and `AdamW(fused=True)`.

The fp32 gradients of the masters are allocated once and written over at every step, since fresh
pages would cost this loop half as much again as the update itself.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.job import Job
from benchmarks.systems import Phases, hyper


class PlainTrainer:
    def __init__(self, job: Job, config: Any) -> None:
        self.phases = Phases()
        from patrickstar.models import GPT

        self.clipping = job.clipping
        self.model = GPT(config)
        self.masters = [p.detach().clone() for p in self.model.parameters()]
        self.model.bfloat16()
        self.weights = list(self.model.parameters())
        self.parameters = sum(p.numel() for p in self.weights)
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **hyper(job))

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        self.phases.start()
        loss = self.model(tokens, targets)
        self.phases.mark("forward")
        loss.backward()
        self.phases.mark("backward")
        for master, weight in zip(self.masters, self.weights, strict=True):
            assert master.grad is not None and weight.grad is not None
            master.grad.copy_(weight.grad)
            weight.grad = None
        if self.clipping:
            torch.nn.utils.clip_grad_norm_(self.masters, self.clipping)
        self.optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.copy_(master)
        self.phases.mark("update")
        return float(loss.item())

    def moved(self) -> dict[str, int]:
        return {}

    def notes(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def load() -> dict[str, str]:
    import patrickstar.models  # noqa: F401

    return {"torch": torch.__version__}


def start(job: Job, config: Any) -> PlainTrainer:
    return PlainTrainer(job, config)
