"""A run under `torchrun` of which a rank is killed in the middle of a step, and that goes on.

torchrun --nproc-per-node 2 --max-restarts 1 elastic_run.py FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

import patrickstar
from patrickstar.models import GPT, GPTConfig

STEPS, SAVE_EVERY, KILLED_IN = 6, 2, 4


def train(folder: Path, *, kill: bool) -> None:
    """Train; the first rank writes a line for every step, and one for where it began."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "patrickstar": {"chunk_size": 4000},
    }
    torch.manual_seed(0)
    model, optimizer = patrickstar.initialize_engine(
        lambda: GPT(GPTConfig(layers=2, width=32, heads=2, positions=8)), config
    )
    model.load_checkpoint(folder / "checkpoints")
    if model.global_rank == 0:
        note(folder, {"begins": model.global_steps})
    for step in range(model.global_steps, STEPS):
        draw = torch.Generator().manual_seed(10 * step + model.global_rank)
        tokens = torch.randint(0, 256, (2, 8), generator=draw)
        loss = model(tokens, tokens.roll(-1, 1))
        if kill and step == KILLED_IN and model.global_rank == 1:
            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = model.mean_over_ranks(loss.item())
        if model.global_rank == 0:
            note(folder, {"step": step, "loss": mean})
        if (step + 1) % SAVE_EVERY == 0:
            model.save_checkpoint(folder / "checkpoints")
    model.close()


def note(folder: Path, what: dict[str, float]) -> None:
    with (folder / "steps.jsonl").open("a") as lines:
        lines.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    train(Path(sys.argv[1]), kill=first)
