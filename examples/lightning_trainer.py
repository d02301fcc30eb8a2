"""Lightning's Trainer on chunks: the argument `strategy`.

    pip install patrickstar[lightning]
    python examples/lightning_trainer.py

The LightningModule is an ordinary one. What `configure_model` builds goes straight into chunks, so
it may be larger than memory. Its state is 50 MB here, the host gets 32 MiB.
"""

import tempfile

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from patrickstar.data import load_corpus
from patrickstar.integrations.lightning import PatrickStarStrategy
from patrickstar.models import GPT, GPTConfig

LENGTH = 64


class LanguageModel(pl.LightningModule):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt: GPT | None = None

    def configure_model(self) -> None:
        if self.gpt is None:  # Lightning may ask again
            self.gpt = GPT(GPTConfig(layers=4, width=256, heads=4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (tokens,) = batch
        loss = self.gpt(tokens[:, :-1], tokens[:, 1:])
        if batch_idx % 5 == 0:
            print(f"loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    pl.seed_everything(0)
    text = torch.as_tensor(load_corpus().tokens[: 1 << 20]).long()
    lines = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    data = torch.utils.data.TensorDataset(lines)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        memory = {"host": "32MiB", "disk": {"path": f"{folder}/spool"}}
        strategy = PatrickStarStrategy(config={"patrickstar": {"memory": memory}})
        trainer = pl.Trainer(
            strategy=strategy,
            precision="bf16-true",  # with master weights in fp32
            max_steps=21,
            gradient_clip_val=1.0,
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=10)],
            logger=False,
            enable_progress_bar=False,
        )
        model = LanguageModel()
        trainer.fit(model, loader)
        state = 16 * sum(p.numel() for p in model.parameters())
        host = strategy.engine.memory_report().tiers["host"]
        print(f"state {state / 2**20:.1f} MiB, peak on the host {host.peak / 2**20:.1f} MiB")
        strategy.engine.close()


if __name__ == "__main__":
    main()
