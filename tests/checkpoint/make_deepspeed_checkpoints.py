"""Writes the checkpoints in `tests/checkpoint/deepspeed`, with DeepSpeed itself.

    DS_ACCELERATOR=cpu python -m tests.checkpoint.make_deepspeed_checkpoints FOLDER

One folder for each of KINDS, of two processes and three steps, and beside each the values that
DeepSpeed says it has (full master weights and moments, in `expected.safetensors`) and the losses of
the steps that it makes when it goes on from there in new processes (`resumed.json`). Folders that
are there already are left as they are, apart from what is missing in them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

STEPS = 3
RESUMED = 12
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
KINDS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    **{
        f"zero{stage}-{precision}": (stage, precision, {}, {})
        for stage in (1, 2, 3)
        for precision in ("bf16", "fp32")
    },
    "zero1-fp32-gradients-bf16": (1, "bf16", {}, FP32_GRADIENTS),
    "zero2-offload-bf16": (2, "bf16", OFFLOADED, FP32_GRADIENTS),
    "zero3-offload-fp32": (3, "fp32", {**OFFLOADED, "sub_group_size": 40}, {}),
}
"""By name: ZeRO's stage, the precision, and what else is in ZeRO's section and in the config."""


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


def config(kind: str) -> dict[str, Any]:
    stage, precision, zero, more = KINDS[kind]
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "zero_force_ds_cpu_optimizer": False,
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
        **more,
    }


def batch_after(step: int, rank: int) -> torch.Tensor:
    """What process `rank` is given in step `step` after going on."""
    generator = torch.Generator().manual_seed(100 + 2 * step + rank)
    return torch.randint(0, 11, (2, 3), generator=generator)


def start(rank: int, world: int, kind: str, port: int) -> Any:
    """DeepSpeed's engine, in one of `world` processes."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",
    )
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    module = Small()
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1 and p.requires_grad]},
        {"params": [p for p in module.parameters() if p.dim() == 1 and p.requires_grad]},
    ]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=config(kind))
    return engine


def run(rank: int, world: int, kind: str, folder: str, port: int) -> None:
    engine = start(rank, world, kind, port)
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from safetensors.torch import save_file

    module, stage = engine.module, KINDS[kind][0]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        loss = engine(torch.randint(0, 11, (2, 3), generator=generator))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, tag="it", client_state={"epoch": 4, "note": ("a", 1)})
    if stage < 3 and hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
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
    leave()


def leave() -> None:
    """End the process when all have come here. DeepSpeed leaves threads behind."""
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def go_on(rank: int, world: int, kind: str, folder: str, port: int) -> None:
    engine = start(rank, world, kind, port)
    engine.load_checkpoint(folder, tag="it")
    losses = []
    for step in range(RESUMED):
        loss = engine(batch_after(step, rank))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / world)
    if rank == 0:
        (Path(folder) / "resumed.json").write_text(json.dumps(losses, indent=1) + "\n")
    leave()


def main() -> None:
    port = 29650
    for kind in KINDS:
        folder = Path(sys.argv[1]) / kind
        folder.mkdir(parents=True, exist_ok=True)
        port += 1
        if not (folder / "expected.safetensors").exists():
            spawn(run, (2, kind, str(folder), port), nprocs=2)  # type: ignore[no-untyped-call]
        port += 1
        if not (folder / "resumed.json").exists():
            spawn(go_on, (2, kind, str(folder), port), nprocs=2)  # type: ignore[no-untyped-call]
        for script in folder.glob("*.py"):
            script.unlink()


if __name__ == "__main__":
    main()
