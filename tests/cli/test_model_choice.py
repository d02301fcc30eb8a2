"""Models of the command line: presets, and architectures of Hugging Face."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from patrickstar.cli.model_choice import (
    ModelChoice,
    from_hugging_face,
    from_preset,
    sequence_length,
)
from patrickstar.errors import ConfigError

GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}


def config_file(tmp_path: Path, config: Any) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    return file


def test_a_preset_is_built_with_its_checkpointing() -> None:
    assert from_preset("gpt-tiny", checkpointing=False).build().config.checkpointing is None
    choice = from_preset("gpt-tiny", checkpointing=True)
    assert choice.build().config.checkpointing == "non-reentrant"
    assert (choice.name, choice.positions) == ("gpt-tiny", 256)


def test_without_transformers_the_message_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'patrickstar\[hf\]'"):
        from_hugging_face(config_file(tmp_path, GPT2), checkpointing=False)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_an_architecture_is_built_in_fp32_and_gives_the_loss_of_its_logits(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    choice = from_hugging_face(config_file(tmp_path, config), checkpointing=False)
    model: Any = choice.build().eval()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    tokens = torch.randint(256, (2, 9))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    logits = model.model(input_ids=tokens[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)


def test_positions_and_checkpointing_come_through(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    choice = from_hugging_face(config_file(tmp_path, LLAMA), checkpointing=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model: Any = choice.build()
    assert choice.positions == 64
    assert model.model.is_gradient_checkpointing


@pytest.mark.parametrize(
    "config, match",
    [
        ({"n_layer": 1}, 'no "model_type"'),
        ({"model_type": "gpt-17"}, "gpt-17"),
        ({"model_type": "vit"}, "no causal language model"),
        ({**GPT2, "vocab_size": 100}, "vocab_size .* is 100"),
        ({**GPT2, "n_embd": "wide"}, "n_embd"),
        ({"model_type": 3}, 'no "model_type"'),
        ([], 'no "model_type"'),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(tmp_path: Path, config: Any, match: str) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    with pytest.raises(ConfigError, match=match):
        from_hugging_face(config_file(tmp_path, config), checkpointing=False)


@pytest.mark.parametrize(
    "changes, match", [({"n_head": 3}, "divisible"), ({"activation_function": "no"}, "KeyError")]
)
def test_a_config_that_no_module_can_be_built_of_is_refused(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    choice = from_hugging_face(config_file(tmp_path, {**GPT2, **changes}), checkpointing=False)
    with pytest.raises(ConfigError, match=match):
        choice.build()


def test_the_folder_of_a_config_is_as_good_as_its_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    file = config_file(tmp_path, GPT2)
    assert from_hugging_face(tmp_path, checkpointing=False).name == f"gpt2 from {file}"


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        from_hugging_face(tmp_path / "config.json", checkpointing=False)


@pytest.mark.parametrize(
    "asked, positions, expected",
    [(None, 256, 256), (None, 2048, 512), (None, None, 512), (2048, 2048, 2048), (9, None, 9)],
)
def test_sequences_are_as_long_as_the_model_takes_within_reason(
    asked: int | None, positions: int | None, expected: int
) -> None:
    assert sequence_length(asked, ModelChoice("any", torch.nn.Module, positions)) == expected


def test_a_sequence_longer_than_the_model_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match="65 is longer than the 64 positions"):
        sequence_length(65, ModelChoice("any", torch.nn.Module, 64))


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    with pytest.raises(ConfigError, match=r"absent\.json"):
        from_hugging_face(tmp_path / "absent.json", checkpointing=False)


def test_an_unknown_architecture_is_refused_in_few_words(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "nosuch"}')
    with pytest.raises(ConfigError, match="nosuch") as refused:
        from_hugging_face(file, checkpointing=False)
    assert len(str(refused.value)) < 600 + len(str(file))
