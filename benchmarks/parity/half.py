"""fp16: the loss scale and the skipped steps of every step, across overflows and growth.

DeepSpeed refuses fp16 on a CPU. Its own `DynamicLossScaler` works there, though, and decides here
for a plain loop, in the order of DeepSpeed's stage 1 and 2: look for an overflow, change the scale,
skip, or unscale by the scale that the loss was multiplied by, clip and update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.parity import task

FP16 = {
    "enabled": True,
    "initial_scale_power": 24,
    "loss_scale_window": 40,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_POISONED = (90, 91, 150)  # steps whose loss is multiplied until its gradients overflow
_FACTOR = 1e6


def factor(step: int) -> float:
    return _FACTOR if step in _POISONED else 1.0


class Scaled(nn.Module):
    """The GPT with a loss that can be made too large."""

    def __init__(self) -> None:
        super().__init__()
        self.model = task.build("GPT")

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, by: float) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens, targets)
        return loss.float() * by


def plain(steps: int) -> dict[str, list[Any]]:
    """A loop whose scale is DeepSpeed's business."""
    import deepspeed
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    deepspeed.init_distributed("gloo")  # the scaler asks for the rank when it says something

    scaler = DynamicLossScaler(
        init_scale=2.0 ** FP16["initial_scale_power"],
        scale_window=FP16["loss_scale_window"],
        min_scale=FP16["min_loss_scale"],
        delayed_shift=FP16["hysteresis"],
        consecutive_hysteresis=False,
        raise_error_at_min_scale=False,
        dtype=torch.half,
    )
    module = Scaled().half()
    weights = list(module.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, **task.HYPER)
    found: dict[str, list[Any]] = {"losses": [], "scales": [], "skipped": []}
    taken = 0
    for step in range(steps):
        loss = module(*task.batch(step), factor(step))
        scale = scaler.loss_scale
        (loss * scale).backward()
        overflow = not all(
            bool(torch.isfinite(w.grad).all()) for w in weights if w.grad is not None
        )
        scaler.update_scale(overflow)
        if not overflow:
            for master, weight in zip(masters, weights, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float() / scale
            nn.utils.clip_grad_norm_(masters, task.CLIPPING)
            for group in optimizer.param_groups:
                group["lr"] = task.rate(taken)
            optimizer.step()
            taken += 1
            with torch.no_grad():
                for master, weight in zip(masters, weights, strict=True):
                    weight.copy_(master)
        module.zero_grad()
        found["losses"].append(loss.item() / factor(step))
        found["scales"].append(float(scaler.loss_scale))
        found["skipped"].append(overflow)
    return found


def patrickstar(steps: int, disk: str) -> dict[str, list[Any]]:
    """The engine, under a budget."""
    import patrickstar as deepspeed

    config = task.config("fp32") | {
        "fp16": FP16,
        "patrickstar": {
            "deepspeed_exact": True,
            "memory": {"host": "3MiB", "disk": {"path": disk}},
            "chunk_size": 16384,
        },
    }
    engine, *_ = deepspeed.initialize(model=Scaled(), config=config)
    found: dict[str, list[Any]] = {"losses": [], "scales": [], "skipped": []}
    for step in range(steps):
        before = engine.skipped_steps
        loss = engine(*task.batch(step), factor(step))
        engine.backward(loss)
        engine.step()
        found["losses"].append(loss.item() / factor(step))
        found["scales"].append(float(engine.loss_scale))
        found["skipped"].append(engine.skipped_steps > before)
    engine.close()
    return found
