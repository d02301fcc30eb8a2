"""A GPT, and Hugging Face models, unmodified, train to the same bits as in an ordinary loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from patrickstar.memory import Fifo, Lru
from patrickstar.models import GPT, GPTConfig

from .training import run_engine, run_plain, settings, smallest_budget

transformers = pytest.importorskip("transformers", reason="needs the extra [hf]")

STEPS = 10


def tokens(seed: int, vocabulary: int = 64, shape: tuple[int, int] = (2, 16)) -> torch.Tensor:
    return torch.randint(1, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def causal(seed: int) -> dict[str, Any]:
    ids = tokens(seed)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
    )
    return transformers.MixtralForCausalLM(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return transformers.BertForMaskedLM(config)


def bert_batch(seed: int) -> dict[str, Any]:
    ids = tokens(seed)
    return {"input_ids": ids, "labels": ids}


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def t5_batch(seed: int) -> dict[str, Any]:
    return {"input_ids": tokens(seed), "labels": tokens(seed + 100), "use_cache": False}


def vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        image_size=16, patch_size=4, num_labels=5,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def vit_batch(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 5, (2,), generator=generator),
    }


def gpt(checkpointing: Any = None) -> GPT:
    shape = GPTConfig(
        vocabulary=64, positions=32, layers=3, width=32, heads=2, checkpointing=checkpointing
    )
    return GPT(shape)


def gpt_batch(seed: int) -> dict[str, Any]:
    ids = tokens(seed)
    return {"tokens": ids, "targets": ids.roll(-1, 1)}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Any]]]] = {
    "gpt": (gpt, gpt_batch),
    "gpt2": (gpt2, causal),
    "llama": (llama, causal),
    "mixtral": (mixtral, causal),
    "bert": (bert, bert_batch),
    "t5": (t5, t5_batch),
    "vit": (vit, vit_batch),
}


CHECKPOINTING = [None, "reentrant", "non-reentrant"]


def checkpointed(
    name: str, checkpointing: str | None
) -> tuple[Callable[[], Any], list[dict[str, Any]]]:
    make, batch = MODELS[name]

    def provider() -> Any:
        if name == "gpt":
            return gpt(checkpointing)
        model = make()
        if checkpointing is not None:
            reentrant = checkpointing == "reentrant"
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": reentrant}
            )
            if reentrant and hasattr(model, "enable_input_require_grads") and name != "vit":
                model.enable_input_require_grads()
        return model

    return provider, [batch(seed) for seed in range(STEPS)]


def share(name: str, checkpointing: str | None) -> tuple[list[float], type[Lru] | type[Fifo]]:
    """Budgets over the smallest, and the policy beside the plan, that a pair of these runs with.

    Every model has all of them over its three runs, and every way of checkpointing over the models.
    The whole product is the slow test below.
    """
    model, way = list(MODELS).index(name), CHECKPOINTING.index(checkpointing)
    others = [[1.15, 1.4], [2.0], [3.0]]
    return [1.0, *others[(model + way) % 3]], (Lru, Fifo)[(model + way) % 2]


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("name", MODELS)
def test_a_hugging_face_model_has_the_bits_of_an_ordinary_loop_at_every_budget(
    name: str, checkpointing: str | None, tmp_path: Path
) -> None:
    provider, batches = checkpointed(name, checkpointing)
    expected = run_plain(provider, batches)
    run_engine(provider, batches, settings()).assert_same(expected)
    chunk = 4096
    smallest = smallest_budget(provider, batches, tmp_path, chunk=chunk)
    factors, policy = share(name, checkpointing)
    for factor in factors:
        how = settings(host=int(smallest * factor), disk=tmp_path, chunk=chunk)
        # Gradients are looked at once only, since looking disturbs the plan.
        got = run_engine(provider, batches, how, keep_gradients=factor == factors[-1])
        if factor != factors[-1]:
            got.gradients = expected.gradients
        got.assert_same(expected)
    how = settings(
        host=int(smallest * 1.5), disk=tmp_path, chunk=chunk, policy=policy(), plan=False
    )
    few = batches[:4]  # without a plan one step is as another
    run_engine(provider, few, how).assert_same(run_plain(provider, few))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["planned", "lru", "fifo"])
@pytest.mark.parametrize("how", ["fp32", "bf16", "bf16, clipped"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_too_are_the_same_at_every_budget_for_every_policy(
    name: str, checkpointing: str | None, how: str, policy: str, tmp_path: Path
) -> None:
    provider, batches = checkpointed(name, checkpointing)
    numbers: dict[str, Any] = {
        "precision": how[:4],
        "clipping": 0.05 if "clipped" in how else 0.0,
    }
    fixed: dict[str, Any] = {**numbers, "chunk": 4096, "plan": policy == "planned"}
    if policy != "planned":
        fixed["policy"] = Lru() if policy == "lru" else Fifo()
    if numbers["precision"] == "bf16":
        batches = [tree_map_only(torch.FloatTensor, torch.Tensor.bfloat16, b) for b in batches]
    expected = run_plain(provider, batches, **numbers)
    smallest = smallest_budget(provider, batches, tmp_path, **fixed)
    for factor in (1.0, 1.15, 1.4, 2.0, 3.0, None):
        host = None if factor is None else int(smallest * factor)
        run_engine(provider, batches, settings(host=host, disk=tmp_path, **fixed)).assert_same(
            expected
        )
