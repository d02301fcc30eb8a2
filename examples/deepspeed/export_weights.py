"""Get fp32 weights out of a checkpoint, and put them into a plain model."""

import tempfile

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 2000,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False))
    model[2].weight = model[0].weight  # tied, as in most language models
    return model


def main():
    model = build()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        tokens = torch.randint(32, (4, 8), generator=generator).to(engine.device)
        logits = engine(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), (tokens.flatten() + 1) % 32)
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {loss.item():.9g}")
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        weights = get_fp32_state_dict_from_zero_checkpoint(folder)
    plain = build()
    plain.load_state_dict(weights)
    for name, parameter in plain.named_parameters():
        print(f"step 4 {name} {parameter.detach().double().norm().item():.9g}")


if __name__ == "__main__":
    main()
