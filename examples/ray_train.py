"""Ray Train: the same training function on every worker that Ray starts.

    pip install patrickstar[ray]
    python examples/ray_train.py

Ray starts the workers, connects them with `torch.distributed` and restarts them when one dies. The
engine does what it does under torchrun: each rank keeps its share of the chunks (stage 3) inside
its budgets. A checkpoint is written by all ranks together into the run's folder, and the next
attempt goes on from there. Workers on several machines need a folder that all of them see.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import patrickstar
from patrickstar.data import Batches, load_corpus
from patrickstar.models import GPT, GPTConfig

STEPS, GLOBAL_BATCH, SAVE_EVERY = 12, 4, 4


def train(settings: dict[str, Any]) -> None:
    """What every worker runs; Ray has made the process group."""
    folder = Path(settings["folder"])
    shape = GPTConfig(layers=4, width=128, heads=4, positions=64)
    batches = Batches(load_corpus().tokens, batch_size=GLOBAL_BATCH, sequence_length=64, seed=0)
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        # Of each machine: its workers share this.
        "patrickstar": {"memory": {"host": "24MiB", "disk": {"path": str(folder / "spool")}}},
    }
    torch.manual_seed(0)
    model, optimizer = patrickstar.initialize_engine(lambda: GPT(shape), config)
    model.load_checkpoint(folder / "checkpoints")  # warns if there is none yet
    mine = slice(model.global_rank, None, model.world_size)
    for step in range(model.global_steps, STEPS):
        tokens, targets = (part[mine].to(model.device) for part in batches[step])
        loss = model(tokens, targets)
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY == 0:
            model.save_checkpoint(folder / "checkpoints", keep=2)  # every rank takes part
        mean = model.mean_over_ranks(loss.item())
        ray.train.report({"step": step + 1, "loss": mean})
        if model.global_rank == 0:
            print(f"step {step + 1}  loss {mean:.4f}")
    model.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": folder},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
            run_config=RunConfig(
                name="patrickstar",
                storage_path=folder,
                failure_config=FailureConfig(max_failures=2),
            ),
        )
        result = trainer.fit()
        if result.error is not None:
            raise result.error
    ray.shutdown()


if __name__ == "__main__":
    main()
