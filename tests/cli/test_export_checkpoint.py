"""`patrickstar export-checkpoint`: other programs load what was trained here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from typer.testing import CliRunner

import patrickstar
from patrickstar.checkpoint import exporting
from patrickstar.checkpoint.deepspeed import import_checkpoint
from patrickstar.cli import app
from patrickstar.cli.model_choice import HuggingFaceCausalLM

transformers = pytest.importorskip("transformers", reason="needs the extra [hf]")
STORED = Path(__file__).parents[1] / "checkpoint" / "deepspeed"
SMALL = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["export-checkpoint", *map(str, arguments)])


@pytest.fixture
def imported(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint in bf16, and its master weights."""
    import_checkpoint(STORED / "zero2-bf16", tmp_path / "ours")
    stored = safetensors.torch.load_file(STORED / "zero2-bf16" / "expected.safetensors")
    masters = {n.partition("/")[2]: v for n, v in stored.items() if n.startswith("master/")}
    return tmp_path / "ours", masters


def test_fp32_weights_are_the_masters(imported: Any, tmp_path: Path) -> None:
    folder, masters = imported
    done = run(folder, "--output", tmp_path / "w", "--dtype", "float32")
    assert done.exit_code == 0, done.output
    found = safetensors.torch.load_file(tmp_path / "w" / "model.safetensors")
    for name, values in masters.items():
        assert found[name].dtype is torch.float32 and torch.equal(found[name], values), name
    assert found["seen"].dtype is torch.int64


def test_weights_are_as_they_were_trained_unless_asked_for_otherwise(
    imported: Any, tmp_path: Path
) -> None:
    folder, masters = imported
    assert run(folder, "--output", tmp_path / "w").exit_code == 0
    found = safetensors.torch.load_file(tmp_path / "w" / "model.safetensors")
    assert all(torch.equal(found[name], values.bfloat16()) for name, values in masters.items())


def test_files_are_no_longer_than_asked_and_what_was_written_is_said(
    imported: Any, tmp_path: Path
) -> None:
    folder, masters = imported
    done = run(folder, "--output", tmp_path / "w", "--shard-size", "100B", "--json")
    found = json.loads(done.stdout)
    index = json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text())
    assert found["tensors"] == len(index["weight_map"]) > len(masters)
    assert len(set(index["weight_map"].values())) > 1
    assert found["bytes"] == index["metadata"]["total_size"]
    assert not found["from_pretrained"]


def test_a_weight_passes_through_memory_in_blocks(
    imported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, masters = imported
    monkeypatch.setattr(exporting, "_BLOCK", 7)
    read: list[int] = []
    original = exporting.TensorSet.read_into

    def counted(self: Any, name: str, target: torch.Tensor, start: int = 0) -> None:
        read.append(target.numel())
        original(self, name, target, start)

    monkeypatch.setattr(exporting.TensorSet, "read_into", counted)
    assert run(folder, "--output", tmp_path / "w", "--dtype", "float32").exit_code == 0
    found = safetensors.torch.load_file(tmp_path / "w" / "model.safetensors")
    assert max(read) == 7 and torch.equal(found["embed.weight"], masters["embed.weight"])


def llama(**more: Any) -> Any:
    config = transformers.LlamaConfig(**SMALL, intermediate_size=24, **more)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    sizes = {"vocab_size": 40, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 16}
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **still))


class Wrapped(nn.Module):
    """A model in a user's own, with a head beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 1)
        self.inner = llama()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.inner.model(tokens).last_hidden_state
        return self.head(hidden).mean() + self.inner(tokens, labels=tokens).loss


def loss_of(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    if isinstance(module, Wrapped):
        return module(tokens)  # type: ignore[no-any-return]
    if isinstance(module, HuggingFaceCausalLM):
        return module(tokens, tokens)  # type: ignore[no-any-return]
    return module(tokens, labels=tokens).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("provider", "inner", "left_out"),
    [
        (llama, "", []),
        (lambda: llama(tie_word_embeddings=True), "", []),
        (gpt2, "", []),
        (lambda: HuggingFaceCausalLM(llama()), "model", []),
        (Wrapped, "inner", ["head.weight", "head.bias"]),
    ],
    ids=["llama", "tied llama", "gpt2", "as the command line trains it", "inside another module"],
)
def test_transformers_loads_a_model_that_was_trained_here(
    provider: Callable[[], nn.Module], inner: str, left_out: list[str], tmp_path: Path
) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    tokens = torch.randint(0, 40, (2, 8))
    engine, optimizer = patrickstar.initialize_engine(provider, config)
    engine.backward(loss_of(engine.module, tokens))
    optimizer.step()
    engine.save_checkpoint(tmp_path / "run")
    trained = engine.module.get_submodule(inner)
    trained.config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    with torch.no_grad():
        expected = trained(tokens).logits.clone()
    engine.close()

    hf = tmp_path / "config.json"
    content = {**json.loads(hf.read_text()), "architectures": [type(trained).__name__]}
    hf.write_text(json.dumps(content))
    done = run(tmp_path / "run", "--output", tmp_path / "hf", "--hf", hf, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["left_out"] == left_out
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        ('{"model_type": "llama"', 2, "is no JSON"),
        ('{"hidden_size": 3}', 2, 'it has no "model_type"'),
        ('{"model_type": "no such"}', 2, "can make no model"),
        (json.dumps({"model_type": "llama", **SMALL}), 1, "no weight 'model.embed_tokens.weight'"),
        (None, 2, "cannot be read"),
    ],
)
def test_a_config_that_does_not_fit_is_told(
    content: str | None, code: int, says: str, imported: Any, tmp_path: Path
) -> None:
    hf = tmp_path / "config.json"
    if content is not None:
        hf.write_text(content)
    done = run(imported[0], "--output", tmp_path / "out", "--hf", hf)
    assert (done.exit_code, says in done.stderr) == (code, True), done.stderr
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_checkpoint_is_not_exported_into_itself(imported: Any) -> None:
    done = run(imported[0], "--output", imported[0] / "it")
    assert done.exit_code == 1 and "is a checkpoint itself" in done.stderr
    assert run(imported[0], "--output", imported[0] / "fresh").exit_code == 0


def test_a_checkpoint_of_deepspeed_is_to_be_taken_over_first(tmp_path: Path) -> None:
    done = run(STORED / "zero1-bf16", "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert f"patrickstar import-checkpoint {STORED / 'zero1-bf16'} --tag it" in done.stderr
