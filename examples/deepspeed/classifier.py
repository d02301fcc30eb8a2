"""Classify small pictures: the loader is DeepSpeed's, made of the training data.

deepspeed classifier.py --deepspeed --deepspeed_config classifier.json
"""

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Pictures(torch.utils.data.Dataset):
    """Noise around one picture for each class, so that there is something to learn."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.randint(10, (count,), generator=generator)
        classes = torch.randn(10, 3, 32, 32, generator=generator)
        noise = torch.randn(count, 3, 32, 32, generator=generator)
        self.pictures = classes[self.labels] + 0.5 * noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pictures[index], self.labels[index]


def main():
    parser = argparse.ArgumentParser(description="picture classifier")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=2)
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("classifier.json")))
    args = parser.parse_args()

    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=Pictures(32)
    )
    torch.manual_seed(2)  # the loader shuffles
    criterion = nn.CrossEntropyLoss()
    step = 0
    for _ in range(args.epochs):
        for pictures, labels in loader:
            outputs = engine(pictures.to(engine.device))
            loss = criterion(outputs, labels.to(engine.device))
            engine.backward(loss)
            engine.step()
            print(f"step {step} loss {loss.item():.9g}")
            step += 1


if __name__ == "__main__":
    main()
