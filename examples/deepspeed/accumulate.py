"""Accumulate gradients over four micro-batches, and log once an update."""

import deepspeed
import torch
from torch import nn

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "steps_per_print": 2000,
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True},
    },
    "zero_optimization": {"stage": 2},
}


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    generator = torch.Generator().manual_seed(1)
    total, update = 0.0, 0
    for _ in range(6 * engine.gradient_accumulation_steps()):
        x = torch.randn(4, 16, generator=generator)
        y = x[:, :4].sum(1, keepdim=True).sin()
        loss = nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        total += loss.item()
        if engine.is_gradient_accumulation_boundary():
            print(f"step {update} loss {total / engine.gradient_accumulation_steps():.9g}")
            total, update = 0.0, update + 1
        engine.step()
    print(f"step {update} updates {engine.global_steps}")


if __name__ == "__main__":
    main()
