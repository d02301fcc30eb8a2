"""A small language model and its data, for the tests of Hugging Face's libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY, LENGTH = 64, 16


def llama(**over: Any) -> Any:
    """About 30,000 parameters: 480 KB of state in fp32."""
    import transformers

    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
        }
        | over
    )
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config)


def small() -> Any:
    """`llama` as a `model_init`."""
    return llama()


def saved(folder: Path) -> Path:
    """A folder that `from_pretrained` loads."""
    llama().save_pretrained(folder)
    return folder


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that can be learnt: each counts up from a random start."""

    def __init__(self, size: int = 32) -> None:
        generator = torch.Generator().manual_seed(7)
        self._starts = torch.randint(0, VOCABULARY, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (self._starts[index] + torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": ids, "labels": ids.clone()}
