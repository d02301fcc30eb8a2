"""Let the monitors write what happens, and read it back; a last batch that is not full is dropped.

deepspeed monitors.py
"""

import csv
import tempfile
from pathlib import Path

import deepspeed
import torch
from torch import nn

FOLDER = Path(tempfile.mkdtemp())
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "dataloader_drop_last": True,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 10, "warmup_num_steps": 3},
    },
    "steps_per_print": 2,
    "wall_clock_breakdown": True,
    "csv_monitor": {"enabled": True, "output_path": str(FOLDER), "job_name": "monitors"},
}


def main():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(35, 8, generator=generator)
    data = torch.utils.data.TensorDataset(samples, samples.mean(1, keepdim=True))
    engine, _, loader, _ = deepspeed.initialize(model=net, training_data=data, config=CONFIG)
    step = 0
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {loss.item():.9g}")
        step += 1
    print(f"step {step} batches {len(loader)}")

    folder = FOLDER / "monitors"
    for file in sorted(folder.glob("Train_Samples_*.csv")):
        name = file.stem.removeprefix("Train_Samples_")
        if name == "train_loss":  # DeepSpeed leaves it to its pipeline engine
            continue
        with file.open() as lines:
            rows = list(csv.reader(lines))
        for samples_so_far, value in rows[1:]:
            shown = value if name == "lr" else "1"  # times are never the same
            print(f"step {samples_so_far} {name} {shown}")
    print(f"step {step} timers {len(engine.get_wall_clock_timers())}")


if __name__ == "__main__":
    main()
