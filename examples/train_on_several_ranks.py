"""Train a GPT on several GPUs, or processes, with one script.

    torchrun --nproc-per-node 2 examples/train_on_several_ranks.py
    python examples/train_on_several_ranks.py    # on one, the same losses

Each rank takes its share of the global batch, and keeps its share of the chunks. The run goes on
from its last checkpoint, on any number of ranks: with `torchrun --max-restarts 3`, a rank that died
costs the steps since then.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch

import patrickstar
from patrickstar.data import Batches, load_corpus
from patrickstar.models import GPT, GPTConfig

STEPS, GLOBAL_BATCH, SAVE_EVERY = 12, 4, 4


def main(folder: Path) -> list[float]:
    """Train; returns the losses of the global batches."""
    shape = GPTConfig(layers=4, width=128, heads=4, positions=64)
    batches = Batches(load_corpus().tokens, batch_size=GLOBAL_BATCH, sequence_length=64, seed=0)
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        # Of each machine: its ranks share this.
        "patrickstar": {"memory": {"host": "24MiB", "disk": {"path": str(folder / "spool")}}},
    }
    torch.manual_seed(0)
    model, optimizer = patrickstar.initialize_engine(lambda: GPT(shape), config)
    model.load_checkpoint(folder / "checkpoints")  # warns if there is none yet
    mine = slice(model.global_rank, None, model.world_size)
    losses = []
    for step in range(model.global_steps, STEPS):
        tokens, targets = (part[mine].to(model.device) for part in batches[step])
        loss = model(tokens, targets)
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model.mean_over_ranks(loss.item()))
        if model.global_rank == 0:
            print(f"step {step + 1}  loss {losses[-1]:.4f}")
        if (step + 1) % SAVE_EVERY == 0:
            model.save_checkpoint(folder / "checkpoints", keep=2)  # every rank takes part
    model.close()
    return losses


if __name__ == "__main__":
    runs = os.environ.get("TORCHELASTIC_RUN_ID", "alone")  # the same on all ranks of a run
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / f"run-{runs}"
    main(place)
