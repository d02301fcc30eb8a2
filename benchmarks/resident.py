"""The promise that a host budget is for the process: its peak beside budget and imports.

    python -m benchmarks.resident --model gpt-25m --host 192MiB [--json FILE]

One model is trained under one budget in this process, on a disk for the rest. What counts is the
kernel's own figure: the most that was ever resident (`VmHWM`), less what was resident once the
libraries were imported, less the budget. At most 256 MiB may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import patrickstar
from benchmarks.row import status_bytes
from patrickstar.memory import parse_bytes
from patrickstar.models import GPT, PRESETS, preset

ALLOWED = 256 << 20  # bytes above budget and imports
_VOCABULARY = 256

Batch = dict[str, torch.Tensor]


def bert() -> nn.Module:
    """BERT as its paper's base model: 110M weights, of which the embedding is a quarter."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig())


def llama() -> nn.Module:
    """A Llama of 130M weights, with the vocabulary of its third version: two wide matrices."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256, hidden_size=384, intermediate_size=1024, num_hidden_layers=20,
        num_attention_heads=6, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


HUGGING_FACE: dict[str, Callable[[], nn.Module]] = {"bert-base": bert, "llama-130m": llama}


def provider_of(model: str) -> Callable[[], nn.Module]:
    """Builds `model`. What it needs is imported first, so that it counts as imports."""
    if model not in HUGGING_FACE:
        config = preset(model)
        return lambda: GPT(config)
    import transformers

    # Its classes are imported when they are named.
    assert transformers.BertForMaskedLM and transformers.LlamaForCausalLM
    return HUGGING_FACE[model]


def batch_of(model: str, length: int, draw: torch.Generator) -> Batch:
    """One sequence of `length` tokens, as int64 [1, length]."""
    tokens = torch.randint(1, _VOCABULARY, (1, length), generator=draw)
    if model in HUGGING_FACE:
        return {"input_ids": tokens, "labels": tokens}
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


def measure(model: str, host: str, precision: str, length: int, steps: int, disk: str) -> Any:
    """Train `steps` steps; the bytes that were resident, and those that the budget answers for."""
    provider = provider_of(model)
    imports = status_bytes("VmRSS")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "patrickstar": {"memory": {"host": host, "disk": {"path": disk}}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    torch.manual_seed(0)
    engine, optimizer = patrickstar.initialize_engine(model_provider=provider, config=config)
    draw = torch.Generator().manual_seed(1)
    losses = []
    try:
        for _ in range(steps):
            output = engine(**batch_of(model, length, draw))
            loss = output if isinstance(output, torch.Tensor) else output["loss"]
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        report = engine.memory_report()
        parameters = sum(parameter.numel() for parameter in engine.parameters())
    finally:
        engine.close()
    peak, budget = status_bytes("VmHWM"), parse_bytes(host)
    return {
        "model": model,
        "precision": precision,
        "parameters": parameters,
        "length": length,
        "losses": losses,
        "budget": budget,
        "booked": report.tiers["host"].peak,
        "moved": dict(report.moved),
        "imports": imports,
        "peak": peak,
        "above": peak - imports - budget,
        "allowed": ALLOWED,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=[*PRESETS, *HUGGING_FACE], default="gpt-25m")
    parser.add_argument("--host", default="192MiB")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16")
    parser.add_argument("--length", type=int, default=256, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=given.disk) as folder:
        result = measure(
            given.model, given.host, given.precision, given.length, given.steps, folder
        )
    text = json.dumps(result, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
