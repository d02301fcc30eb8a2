"""One run by each system: the losses of every step, and for fp16 the scales too."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.parity import task

Step = Callable[[torch.Tensor, torch.Tensor], float]


@dataclasses.dataclass
class Run:
    """A trainer that has been set up: `step` makes one update and gives the loss before it."""

    step: Step
    close: Callable[[], None] = lambda: None
    moved: Callable[[], int] = lambda: 0  # bytes between tiers so far


def plain(model: str, precision: str, options: dict[str, Any], disk: str) -> Run:
    """An ordinary loop; in bf16 with fp32 masters, made from weights that were rounded first.

    Rounding first is what DeepSpeed does.
    """
    module = task.build(model)
    weights = list(module.parameters())
    if precision == "bf16":
        module.bfloat16()
        masters = [weight.detach().float() for weight in weights]
    else:
        masters = weights
    optimizer = torch.optim.AdamW(masters, **task.HYPER)
    count = 0

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        nonlocal count
        loss = module(tokens, targets)
        loss.backward()
        if precision == "bf16":
            for master, weight in zip(masters, weights, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, task.CLIPPING)
        for group in optimizer.param_groups:
            group["lr"] = task.rate(count)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                if master is not weight:
                    weight.copy_(master)
        count += 1
        return float(loss.item())

    return Run(step)


def deepspeed(model: str, precision: str, options: dict[str, Any], disk: str) -> Run:
    """DeepSpeed's engine. Options: `zero`, its section; `memory`, budgets of `ChunkedAdamW`."""
    import deepspeed

    config = task.config(precision)
    config["zero_optimization"] = copy.deepcopy(options["zero"])
    config["zero_force_ds_cpu_optimizer"] = False
    if "aio" in options:
        config["aio"] = dict(options["aio"])
    for section in ("offload_param", "offload_optimizer"):
        if config["zero_optimization"].get(section, {}).get("device") == "nvme":
            config["zero_optimization"][section]["nvme_path"] = disk
    module = task.build(model)
    client: dict[str, Any] = {}
    if "memory" in options:
        from patrickstar.optim import ChunkedAdamW

        memory = {**options["memory"], "disk": disk}
        chunked = ChunkedAdamW(module.parameters(), **task.HYPER, memory=memory)
        client = {"optimizer": chunked}
        config["zero_allow_untested_optimizer"] = True
        del config["optimizer"]
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=config, **client
    )

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    def moved() -> int:
        return sum(chunked.memory_report().moved.values()) if client else 0

    return Run(step, engine.destroy, moved)


def patrickstar(model: str, precision: str, options: dict[str, Any], disk: str) -> Run:
    """PatrickStar by DeepSpeed's names. Options: `memory`, its budgets, beside a disk."""
    import patrickstar as deepspeed

    own: dict[str, Any] = {"deepspeed_exact": True}
    if "memory" in options:
        own |= {"memory": {**options["memory"], "disk": {"path": disk}}, "chunk_size": 16384}
    engine, *_ = deepspeed.initialize(
        model=task.build(model), config={**task.config(precision), "patrickstar": own}
    )

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return Run(step, engine.close, lambda: sum(engine.memory_report().moved.values()))


SYSTEMS: dict[str, Callable[[str, str, dict[str, Any], str], Run]] = {
    "plain": plain,
    "deepspeed": deepspeed,
    "patrickstar": patrickstar,
}
