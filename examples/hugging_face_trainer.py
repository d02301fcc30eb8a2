"""Hugging Face's Trainer on chunks: a changed import and the argument `patrickstar`.

    pip install patrickstar[hf]
    python examples/hugging_face_trainer.py

The model is small and made here, so that the example needs no download; `model_init` may as well be
`lambda: AutoModelForCausalLM.from_pretrained("...")`. Its state is 50 MB, the host gets 32 MiB.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from patrickstar.data import load_corpus
from patrickstar.integrations.transformers import Trainer  # was: from transformers import Trainer

LENGTH = 64


class Texts(torch.utils.data.Dataset):
    """Python's own sources, as bytes."""

    def __init__(self) -> None:
        self.bytes = torch.as_tensor(load_corpus().tokens[: 1 << 20]).long()

    def __len__(self) -> int:
        return len(self.bytes) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.bytes[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    shape = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=256,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model_init=lambda: GPT2LMHeadModel(shape),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=20,
                per_device_train_batch_size=2,
                learning_rate=1e-3,
                logging_steps=5,
                save_steps=10,
                report_to=[],
            ),
            train_dataset=Texts(),
            patrickstar={"memory": {"host": "32MiB", "disk": {"path": f"{folder}/spool"}}},
        )
        trainer.train()
        state = 16 * sum(p.numel() for p in trainer.model.parameters())
        host = trainer.engine.memory_report().tiers["host"]
        print(f"state {state / 2**20:.1f} MiB, peak on the host {host.peak / 2**20:.1f} MiB")
        trainer.engine.close()


if __name__ == "__main__":
    main()
