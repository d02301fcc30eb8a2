"""Training with offloaded activations under engines that are not ours; used by several tests.

As a program, `offloaded_run.py FOLDER`, it is one rank of a DeepSpeed run of every stage.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import patrickstar
from patrickstar.models import GPT, GPTConfig

STEPS = 4


def build() -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=2, width=32, heads=2))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(9 * step + rank))


def both(losses: Any, folder: str) -> dict[str, Any]:
    """The losses with and without offloading, and what the offloading did."""
    memory = {"host": 100_000, "disk": folder}
    offload = patrickstar.offload_activations(memory=memory, larger_than=1024)
    found = {"plain": losses(nullcontext()), "offloaded": losses(offload)}
    report = offload.memory_report()
    offload.close()
    return {
        **found,
        "peak": report.tiers["host"].peak,
        "moved": report.moved.get("disk->host", 0),
        "left": report.tiers["host"].in_use + report.tiers["disk"].in_use,
    }


def torch_losses(kind: str, around: Any) -> list[float]:
    module = build()
    if kind == "ddp":
        run: nn.Module = nn.parallel.DistributedDataParallel(module)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in module.blocks:  # type: ignore[union-attr]
            fully_shard(layer)
        run = fully_shard(module)
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        tokens = batch(step, dist.get_rank())
        with around:
            loss = run(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def under_torch(rank: int, size: int, kind: str, folder: str) -> dict[str, Any]:
    return both(lambda around: torch_losses(kind, around), folder)


def deepspeed_losses(stage: int, around: Any) -> list[float]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=build(), config=config)
    found = []
    for step in range(STEPS):
        tokens = batch(step, dist.get_rank())
        with around:
            loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = sys.argv[1]
    found = {
        stage: both(lambda around, stage=stage: deepspeed_losses(stage, around), folder)
        for stage in (1, 2, 3)
    }
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # DeepSpeed leaves threads behind


if __name__ == "__main__":
    main()
