"""Checkpoints of Hugging Face models, with and without adapters, are Hugging Face's own format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patrickstar.checkpoint import open_checkpoint
from patrickstar.engine.initialize import make_engine
from patrickstar.engine.saving import save

from .saved_runs import assert_same, engine_for, everything, resumed, through, train
from .test_hugging_face_models import causal, llama
from .training import settings

transformers = pytest.importorskip("transformers", reason="needs the extra [hf]")
BATCHES = [causal(seed) for seed in range(4)]


def tied_gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=2)
    assert config.tie_word_embeddings
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("make", [llama, tied_gpt2])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000], ids=["one file", "shards"])
def test_transformers_loads_a_checkpoint_directly(
    make: Any, shard_bytes: int, tmp_path: Path
) -> None:
    engine, optimizer = engine_for(make, settings(precision="bf16", chunk=9000))
    train(engine, optimizer, BATCHES[:2])
    path = save(engine._training(), tmp_path, "it", {}, shard_bytes=shard_bytes)
    expected = {k: v.clone() for k, v in engine.state_dict().items()}
    engine.close()
    files = list(path.glob("model-*.safetensors"))
    assert (len(files) > 1) == (shard_bytes == 20_000)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype="auto", output_loading_info=True
    )
    assert type(loaded).__name__ in ("LlamaForCausalLM", "GPT2LMHeadModel")
    assert not info["missing_keys"] and not info["unexpected_keys"]
    found = loaded.state_dict()
    for name, weight in expected.items():
        assert found[name].dtype is torch.bfloat16 and torch.equal(found[name], weight), name


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    engine, _ = engine_for(tied_gpt2, settings())
    engine.save_checkpoint(tmp_path)
    engine.close()
    with open_checkpoint(tmp_path) as found:
        assert "transformer.wte.weight" in found.weights
        assert "lm_head.weight" not in found.weights


def test_weights_for_use_elsewhere_load_by_the_folder_alone(tmp_path: Path) -> None:
    engine, _ = engine_for(llama, settings(precision="bf16"))
    engine.save_16bit_model(tmp_path)
    expected = {k: v.clone() for k, v in engine.state_dict().items()}
    engine.close()
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft", reason="needs the extra [hf]")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM"
    )
    made: nn.Module = peft.get_peft_model(llama(), config)
    return made


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_with_adapters_resumes_with_its_bits(precision: str, tmp_path: Path) -> None:
    how = settings(precision=precision, chunk=4000)
    expected = through(adapted, how, BATCHES)
    got = resumed(adapted, how, BATCHES, 2, tmp_path)
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])
    assert any("lora_B" in name and value.any() for name, value in got[1].items() if "." in name)


def test_adapters_alone_are_a_small_checkpoint(tmp_path: Path) -> None:
    engine, optimizer = engine_for(adapted, settings(precision="bf16", chunk=4000))
    train(engine, optimizer, BATCHES[:2])
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    expected = everything(engine)
    engine.close()
    with open_checkpoint(tmp_path) as found:
        assert all("lora" in name for name in found.weights.names())
        assert all("lora" in name for name in found.optimizer.names())
    torch.manual_seed(0)  # the same frozen weights
    engine, _ = make_engine(adapted, settings(precision="bf16", chunk=4000))
    engine.load_checkpoint(tmp_path)
    assert_same(everything(engine), expected)
    engine.close()
