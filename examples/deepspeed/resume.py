"""Save a checkpoint, start a new engine, load it, and train on with the same losses."""

import tempfile

import deepspeed
import torch
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 2000,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 1e-2}},
    "zero_optimization": {"stage": 1},
}


def start():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    return engine


def train(engine, steps):
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(engine(x.to(engine.device)), x[:, :1].to(engine.device))
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {loss.item():.9g}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        engine = start()
        train(engine, range(4))
        engine.save_checkpoint(folder, tag="halfway", client_state={"next_step": 4})
        train(engine, range(4, 8))

        resumed = start()
        path, client_state = resumed.load_checkpoint(folder)
        assert path is not None and "halfway" in path
        assert resumed.global_steps == 4
        train(resumed, range(client_state["next_step"], 8))


if __name__ == "__main__":
    main()
