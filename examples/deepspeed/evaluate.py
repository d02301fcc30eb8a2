"""Train, and evaluate after each epoch: modes, dropout, a metric without gradients."""

import deepspeed
import torch
from deepspeed.utils import RepeatingLoader
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "steps_per_print": 2000,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
}


def points(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return torch.utils.data.TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    criterion = nn.CrossEntropyLoss()
    training = iter(RepeatingLoader(torch.utils.data.DataLoader(points(32, 1), batch_size=8)))
    held_out = torch.utils.data.DataLoader(points(24, 2), batch_size=8)
    for epoch in range(3):
        engine.train()
        for step in range(4 * epoch, 4 * epoch + 4):
            x, y = next(training)
            loss = criterion(engine(x.to(engine.device)), y.to(engine.device))
            engine.backward(loss)
            engine.step()
            print(f"step {step} loss {loss.item():.9g}")
        engine.eval()
        with torch.no_grad():
            losses = [
                criterion(engine(x.to(engine.device)), y.to(engine.device)) for x, y in held_out
            ]
        print(f"step {epoch} evaluation {torch.stack(losses).mean().item():.9g}")


if __name__ == "__main__":
    main()
