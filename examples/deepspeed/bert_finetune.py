"""Fine-tune Hugging Face's BERT on sentence pairs, with a linear warmup and decay."""

import argparse

import deepspeed
import torch
from transformers import BertConfig, BertForSequenceClassification

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 8,
    "steps_per_print": 2000,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 5e-4, "weight_decay": 0.01, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": 5e-4,
            "warmup_num_steps": 2,
            "total_num_steps": 8,
            "warmup_type": "linear",
        },
    },
    "zero_optimization": {"stage": 1},
}


def batches(count, size, length):
    """The label says whether the two halves are the same."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        labels = torch.randint(2, (size,), generator=generator)
        first = torch.randint(5, 100, (size, length // 2), generator=generator)
        other = torch.randint(5, 100, (size, length // 2), generator=generator)
        second = torch.where(labels[:, None].bool(), first, other)
        kinds = torch.cat([torch.zeros_like(first), torch.ones_like(second)], 1)
        yield {
            "input_ids": torch.cat([first, second], 1),
            "token_type_ids": kinds,
            "attention_mask": torch.ones_like(kinds),
            "labels": labels,
        }


def main():
    parser = argparse.ArgumentParser(description="BERT fine-tuning")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(shape)
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), config=CONFIG
    )
    engine.train()
    for step, batch in enumerate(batches(args.steps, 8, 16)):
        batch = {name: value.to(engine.device) for name, value in batch.items()}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {loss.item():.9g}")
        print(f"step {step} norm {engine.get_global_grad_norm():.9g}")


if __name__ == "__main__":
    main()
