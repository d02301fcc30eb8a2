"""One rank of runs that train one model at every stage, with DeepSpeed's engine and with ours.

    torchrun --nproc-per-node 2 beside_deepspeed.py FOLDER

The first rank writes the losses of both into FOLDER, by stage.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import patrickstar
from patrickstar.models import GPT, GPTConfig

STEPS, ACCUMULATION, ROWS, LENGTH = 10, 2, 2, 16


def build() -> nn.Module:
    """The head is tied; what two ranks do not divide is in every layer."""
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=2, width=33, heads=3, vocabulary=61, positions=LENGTH))


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": stage},
    }


def train(engine: Any) -> list[float]:
    """The loss of the global batch in every step."""
    losses = []
    for _ in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(ACCUMULATION):
            draw = torch.Generator().manual_seed(10 * micro + dist.get_rank())
            tokens = torch.randint(61, (ROWS, LENGTH), generator=draw)
            loss = engine(tokens, tokens.roll(-1, 1))
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / ACCUMULATION / dist.get_world_size())
    return losses


def main(folder: Path) -> None:
    import deepspeed

    # Its all-reduce over shared memory is compiled for minutes; without it, it uses gloo as we do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[int, Any] = {}
    for stage in range(4):
        engine, *_ = patrickstar.initialize(model=build(), config=config(stage))
        ours = train(engine)
        engine.close()
        theirs = train(deepspeed.initialize(model=build(), config=config(stage))[0])
        found[stage] = {"ours": ours, "theirs": theirs}
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # DeepSpeed leaves threads behind


if __name__ == "__main__":
    main(Path(sys.argv[1]))
