"""Compute activations again in the backward, with DeepSpeed's checkpointing."""

import deepspeed
import torch
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 2000,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "activation_checkpointing": {"cpu_checkpointing": False},
}


class Layer(nn.Module):
    """A feed-forward block."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks that are each computed again in the backward."""

    def __init__(self, width=16, layers=4):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.last = nn.Linear(width, 2)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = deepspeed.checkpointing.checkpoint(layer, x)
        return self.last(x)


def main():
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Model()
    deepspeed.checkpointing.configure(None, deepspeed_config=CONFIG)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        x = torch.randn(4, 8, generator=generator)
        y = (x.sum(1) > 0).long()
        loss = nn.functional.cross_entropy(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {loss.item():.9g}")


if __name__ == "__main__":
    main()
