"""Train a GPT in less memory than its state, in a script of your own.

The training loop is an ordinary one. What is new is `initialize_engine`: it builds the model
straight into chunks, under the budgets that the config gives, and returns the model and its
optimizer.

    python examples/train_gpt.py
"""

from __future__ import annotations

import tempfile

import patrickstar
from patrickstar.data import Batches, load_corpus
from patrickstar.memory.sizes import format_bytes
from patrickstar.models import GPT, GPTConfig

STEPS = 20


def main() -> None:
    shape = GPTConfig(layers=4, width=256, heads=4, positions=128)
    batches = Batches(load_corpus().tokens, batch_size=2, sequence_length=128, seed=0)
    with tempfile.TemporaryDirectory() as spool:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
            "gradient_clipping": 1.0,
            "patrickstar": {"memory": {"host": "32MiB", "disk": {"path": spool}}},
        }
        model, optimizer = patrickstar.initialize_engine(lambda: GPT(shape), config)
        for step in range(STEPS):
            tokens, targets = (part.to(model.device) for part in batches[step])
            loss = model(tokens, targets)
            model.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}  loss {loss.item():.4f}")
        for name, usage in model.memory_report().tiers.items():
            print(f"{name}: at most {format_bytes(usage.peak)}")
        model.close()


if __name__ == "__main__":
    main()
