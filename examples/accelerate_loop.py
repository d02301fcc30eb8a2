"""A loop written for Hugging Face Accelerate, on chunks: a changed import and a config.

pip install patrickstar[hf]
python examples/accelerate_loop.py
"""

import tempfile

import torch

from patrickstar.data import Batches, load_corpus
from patrickstar.integrations.accelerate import Accelerator  # was: from accelerate import ...
from patrickstar.models import GPT, GPTConfig


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        memory = {"host": "32MiB", "disk": {"path": f"{folder}/spool"}}
        accelerator = Accelerator(
            config={"patrickstar": {"memory": memory}}, gradient_accumulation_steps=2
        )
        model = GPT(GPTConfig(layers=4, width=256, heads=4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        batches = Batches(load_corpus().tokens, batch_size=2, sequence_length=64, seed=0)
        for step in range(20):
            tokens, targets = (part.to(accelerator.device) for part in batches[step])
            with accelerator.accumulate(model):
                loss = model(tokens, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            print(f"step {step} loss {loss.item():.4f}")
        accelerator.save_state(f"{folder}/saved")
        state = 16 * sum(p.numel() for p in model.parameters())
        host = model.memory_report().tiers["host"]
        print(f"state {state / 2**20:.1f} MiB, peak on the host {host.peak / 2**20:.1f} MiB")
        model.close()


if __name__ == "__main__":
    main()
