"""A run of DeepSpeed's goes on here, with its masters, moments, steps and schedule."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from patrickstar.checkpoint.deepspeed import import_checkpoint
from patrickstar.engine.initialize import make_engine
from patrickstar.optim import WarmupLR

from ..checkpoint.make_deepspeed_checkpoints import Small
from .saved_runs import everything
from .training import settings

STORED = Path(__file__).parents[1] / "checkpoint" / "deepspeed"


def groups(module: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("kind", sorted(path.name for path in STORED.iterdir()))
def test_a_run_of_deepspeed_goes_on(kind: str, tmp_path: Path) -> None:
    import_checkpoint(STORED / kind, tmp_path)
    precision = kind.rpartition("-")[2]
    how = dataclasses.replace(
        settings(precision=precision, chunk=40, hyper={"lr": 1.0}),
        make_scheduler=lambda o: WarmupLR(o, warmup_max_lr=1e-2, warmup_num_steps=10),
    )
    engine, optimizer = make_engine(Small, how, groups)
    _, client = engine.load_checkpoint(tmp_path)
    assert client == {"epoch": 4, "note": ("a", 1)} and engine.global_steps == 3
    found = everything(engine)
    expected = safetensors.torch.load_file(STORED / kind / "expected.safetensors")
    for key, values in expected.items():
        state, name = key.split("/")
        ours = found.get(f"{state} of {name}", found[name])
        assert torch.equal(ours.flatten(), values.flatten()), key
        assert found[f"step of {name}"] == 3
    assert found["seen"] == 3
    scheduler = optimizer.stepping.scheduler
    assert scheduler is not None and scheduler.last_batch_iteration == 2
    assert engine.get_lr() == scheduler.get_last_lr() and 0 < engine.get_lr()[0] < 1e-2

    # One more step gives what torch's AdamW makes of DeepSpeed's masters and moments.
    ids = torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(9))
    engine.backward(engine(ids))
    grads = {
        n: p.grad.detach().clone().float()
        for n, p in engine.named_parameters()
        if p.grad is not None
    }
    lr = engine.get_lr()[0]
    optimizer.step()
    after = everything(engine)
    engine.close()
    for name, gradient in grads.items():
        weight = expected[f"master/{name}"].reshape(gradient.shape).clone()
        weight.grad = gradient.clone()
        reference = torch.optim.AdamW(
            [weight], lr=lr, weight_decay=0.01 if gradient.dim() > 1 else 0.0, fused=True
        )
        reference.state[weight] = {
            "step": torch.tensor(3.0),
            **{
                key: expected[f"{key}/{name}"].reshape(gradient.shape).clone()
                for key in ("exp_avg", "exp_avg_sq")
            },
        }
        reference.step()
        ours = after.get(f"master of {name}", after[name])
        assert torch.equal(ours.flatten(), weight.flatten()), name
