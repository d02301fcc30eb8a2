"""Build a model inside zero.Init, and look at and change its weights inside GatheredParameters."""

import deepspeed
import torch
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 2000,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 100000,
    },
}


class Model(nn.Module):
    """Residual layers under a linear head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def main():
    deepspeed.init_distributed()
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Model()
    for layer in model.layers:
        with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0):
            nn.init.orthogonal_(layer.weight, generator=torch.Generator().manual_seed(2))
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        x = torch.randn(4, 32, generator=generator)
        y = x[:, :4].argmax(1)
        loss = nn.functional.cross_entropy(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {loss.item():.9g}")
    with deepspeed.zero.GatheredParameters(list(model.head.parameters())):
        print(f"step 6 head {model.head.weight.float().norm().item():.9g}")


if __name__ == "__main__":
    main()
