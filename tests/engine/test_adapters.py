"""Adapters of `peft`, unmodified, on a frozen base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .test_hugging_face_models import causal, llama
from .training import run_engine, run_plain, settings

peft = pytest.importorskip("peft", reason="needs the extra [hf]")


def lora() -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(llama(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros by default, which would leave the first gradients of A zero
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def checkpointed_lora() -> Any:
    model = lora()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@pytest.mark.parametrize("provider", [lora, checkpointed_lora])
def test_lora_trains_to_the_bits_of_an_ordinary_loop(provider: Any, tmp_path: Path) -> None:
    batches = [causal(seed) for seed in range(5)]
    expected = run_plain(provider, batches)
    for how in (
        settings(),
        settings(host=400_000, disk=tmp_path, chunk=2048),
        settings(device=300_000, host=400_000, disk=tmp_path, chunk=2048),
    ):
        got = run_engine(provider, batches, how)
        got.assert_same(expected)
    trained = [g is not None for g in expected.gradients[0]]
    assert any(trained) and not all(trained)
