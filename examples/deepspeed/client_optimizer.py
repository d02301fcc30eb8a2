"""Bring an optimizer with two parameter groups: no weight decay for biases and norms."""

import deepspeed
import torch
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "steps_per_print": 2000,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
}


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 3))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.9, 0.98),
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=CONFIG
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        x = torch.randn(8, 12, generator=generator)
        y = x[:, :3].argmax(1)
        loss = nn.functional.cross_entropy(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {loss.item():.9g}")
        print(f"step {step} rate {optimizer.param_groups[0]['lr']:.9g}")


if __name__ == "__main__":
    main()
