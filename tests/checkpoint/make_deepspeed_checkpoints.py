"""Writes the checkpoints in `tests/checkpoint/deepspeed`, with DeepSpeed itself.

    DS_ACCELERATOR=cpu python -m tests.checkpoint.make_deepspeed_checkpoints FOLDER

One folder for each ZeRO stage and precision, of two processes and three steps, and beside each the
values that DeepSpeed says it has: full master weights and moments, in `expected.safetensors`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

STEPS = 3


class Small(nn.Module):
    """Sizes that no number of processes divides, a tied and a frozen weight, and a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.norm = nn.LayerNorm(5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.frozen(self.norm(self.embed(ids))) * self.scale
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), ids.flatten())


def config(stage: int, precision: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
    }


def run(rank: int, world: int, stage: int, precision: str, folder: str, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",
    )
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from safetensors.torch import save_file

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    module = Small()
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1 and p.requires_grad]},
        {"params": [p for p in module.parameters() if p.dim() == 1 and p.requires_grad]},
    ]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=groups, config=config(stage, precision)
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        loss = engine(torch.randint(0, 11, (2, 3), generator=generator))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, tag="it", client_state={"epoch": 4, "note": ("a", 1)})
    if stage < 3:
        # Linked after the first group's first update, when the second group has no states yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            found[f"master/{name}"] = safe_get_full_fp32_param(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{key}/{name}"] = safe_get_full_optimizer_state(parameter, key)
    if rank == 0:
        found = {k: v.float().clone().contiguous() for k, v in found.items()}
        save_file(found, Path(folder) / "expected.safetensors")
    torch.distributed.barrier()


def main() -> None:
    port = 29650
    for stage in (1, 2, 3):
        for precision in ("bf16", "fp32"):
            folder = Path(sys.argv[1]) / f"zero{stage}-{precision}"
            folder.mkdir(parents=True, exist_ok=True)
            port += 1
            spawn(run, (2, stage, precision, str(folder), port), nprocs=2)  # type: ignore[no-untyped-call]
            for script in folder.glob("*.py"):
                script.unlink()


if __name__ == "__main__":
    main()
