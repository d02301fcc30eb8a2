"""One rank of a run whose data parallelism is somebody else's; prints its losses.

    foreign_run.py KIND OPTIMIZER FOLDER

KIND is deepspeed-1, deepspeed-2, ddp or fsdp2; OPTIMIZER is torch or chunked.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from patrickstar.optim import ChunkedAdamW

HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))


def optimizer_for(kind: str, module: nn.Module, folder: str) -> torch.optim.Optimizer:
    if kind == "torch":
        return torch.optim.AdamW(module.parameters(), fused=True, **HYPER)
    memory = {"host": 40_000, "disk": folder}
    return ChunkedAdamW(module.parameters(), **HYPER, memory=memory, chunk_size=512)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank))


def deepspeed_losses(stage: int, name: str, folder: str) -> list[float]:
    import deepspeed

    module = build()
    optimizer = optimizer_for(name, module, folder)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    losses = []
    for step in range(6):
        loss = engine(batch(step, dist.get_rank()).bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def torch_losses(kind: str, name: str, folder: str) -> list[float]:
    module = build()
    if kind == "ddp":
        run: nn.Module = nn.parallel.DistributedDataParallel(module)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in module:
            fully_shard(layer)
        run = fully_shard(module)
    optimizer = optimizer_for(name, run, folder)
    losses = []
    for step in range(6):
        loss = run(batch(step, dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    kind, name, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if kind.startswith("deepspeed"):
        losses = deepspeed_losses(int(kind[-1]), name, folder)
    else:
        losses = torch_losses(kind, name, folder)
    if dist.get_rank() == 0:
        print("LOSSES", json.dumps(losses), flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed leaves threads behind


if __name__ == "__main__":
    main()
