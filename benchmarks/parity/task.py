"""What everybody trains: models, data, hyperparameters and the schedule of the learning rate.

The tokens are a walk with two bits of chance a step, so losses fall from the logarithm of the
vocabulary towards log 4 and neither vanish nor spike, which would blow up differences of the last
bit. For the same reason the learning rate is moderate and warmed up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

STEPS = 200
VOCABULARY, LENGTH, SEQUENCES = 64, 32, 8
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WARMUP = 20
CLIPPING = 1.0
MODELS = ("GPT", "Llama", "BERT")
PRECISIONS = ("fp32", "bf16")
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class WithLoss(nn.Module):
    """A model of transformers that returns the fp32 loss for targets given apart."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(model: str) -> nn.Module:
    """The model called `model`, or a preset, in fp32, the same weights at every call."""
    torch.manual_seed(0)
    if model not in MODELS:
        from patrickstar.models import GPT, preset

        return GPT(preset(model))
    if model == "GPT":
        from patrickstar.models import GPT, GPTConfig

        shape = GPTConfig(layers=2, width=64, heads=4, vocabulary=VOCABULARY, positions=LENGTH)
        return GPT(shape)
    import transformers

    if model == "Llama":
        config: Any = transformers.LlamaConfig(
            **_SMALL, max_position_embeddings=LENGTH, use_cache=False
        )
        return WithLoss(transformers.LlamaForCausalLM(config))
    config = transformers.BertConfig(
        **_SMALL,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return WithLoss(transformers.BertForMaskedLM(config))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of step `step`: int64 [SEQUENCES, LENGTH] each."""
    generator = torch.Generator().manual_seed(step)
    walk = torch.empty(SEQUENCES, LENGTH + 1, dtype=torch.int64)
    walk[:, 0] = torch.randint(0, VOCABULARY, (SEQUENCES,), generator=generator)
    chance = torch.randint(0, 4, walk.shape, generator=generator)
    for place in range(LENGTH):
        walk[:, place + 1] = (5 * walk[:, place] + chance[:, place]) % VOCABULARY
    return walk[:, :-1].contiguous(), walk[:, 1:].contiguous()


def rate(step: int) -> float:
    """The learning rate of step `step`: WarmupLR, which stands still for a step, in a line."""
    return float(HYPER["lr"]) * min(max(step - 1, 0) / WARMUP, 1.0)


def config(precision: str) -> dict[str, Any]:
    """The config of the run, as DeepSpeed and PatrickStar both read it."""
    return {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_clipping": CLIPPING,
        "optimizer": {
            "type": "AdamW",
            "params": {**HYPER, "betas": list(HYPER["betas"]), "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_max_lr": HYPER["lr"],
                "warmup_num_steps": WARMUP,
                "warmup_type": "linear",
            },
        },
        **(
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
            if precision == "bf16"
            else {}
        ),
    }
