"""Look at master weights, gradients and moments between backward and step."""

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 2000,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    generator = torch.Generator().manual_seed(1)
    weight = engine.module[0].weight
    for step in range(4):
        x = torch.randn(4, 16, generator=generator).to(engine.device)
        loss = engine(x).square().mean()
        engine.backward(loss)
        gradient = safe_get_full_grad(weight)
        print(f"step {step} gradient {gradient.norm().item():.9g}")
        engine.step()
        master = safe_get_full_fp32_param(weight)
        moment = safe_get_full_optimizer_state(weight, "exp_avg")
        print(f"step {step} loss {loss.item():.9g}")
        print(f"step {step} master {master.norm().item():.9g}")
        print(f"step {step} moment {moment.norm().item():.9g}")


if __name__ == "__main__":
    main()
