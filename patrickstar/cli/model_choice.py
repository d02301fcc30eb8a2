"""Which model the command line trains: a preset, or an architecture from a Hugging Face config.

Both come out as a callable that builds a module with the interface of `patrickstar.models.GPT`:
`loss = module(tokens, targets)`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from patrickstar.errors import ConfigError
from patrickstar.models import GPT, preset

_BYTES = 256


@dataclass(frozen=True)
class ModelChoice:
    """A model to build.

    Attributes:
        name: for people.
        build: makes the module.
        positions: longest sequence it takes, in tokens; None if it does not say.
    """

    name: str
    build: Callable[[], nn.Module]
    positions: int | None


def from_preset(name: str, *, checkpointing: bool) -> ModelChoice:
    """The preset `name`.

    Raises:
        ConfigError: there is no such preset.
    """
    config = preset(name)
    if checkpointing:
        config = dataclasses.replace(config, checkpointing="non-reentrant")
    return ModelChoice(name, lambda: GPT(config), config.positions)


def from_hugging_face(file: Path, *, checkpointing: bool) -> ModelChoice:
    """The causal language model that the `config.json` in `file` describes, with random weights.

    Raises:
        ConfigError: transformers is missing, or it cannot make a model of the file that reads
            bytes.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "--hf-config needs the package transformers; install it with "
            "`pip install 'patrickstar[hf]'`, or train a preset with --model"
        ) from error
    config = _read(file, transformers)
    vocabulary = getattr(config, "vocab_size", None)
    if isinstance(vocabulary, int) and vocabulary < _BYTES:
        raise ConfigError(
            f"vocab_size in {str(file)!r} is {vocabulary}; training reads bytes, so it must be at "
            f"least {_BYTES}"
        )

    def build() -> nn.Module:
        # In fp32, whatever the file says: the training precision comes from the config.
        auto: Any = transformers.AutoModelForCausalLM
        model: Any = auto.from_config(config, dtype=torch.float32)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return HuggingFaceCausalLM(model)

    positions = getattr(config, "max_position_embeddings", None)
    return ModelChoice(
        f"{config.model_type} from {file}", build, positions if isinstance(positions, int) else None
    )


def _read(file: Path, transformers: Any) -> Any:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        kind = content.pop("model_type")
        config = transformers.AutoConfig.for_model(kind, **content)
    except OSError as error:
        raise ConfigError(
            f"the Hugging Face config {str(file)!r} cannot be read ({error.strerror})"
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = 'it has no "model_type"' if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{str(file)!r} is no Hugging Face config that transformers can use: {what}. "
            "Give the config.json of a causal language model"
        ) from error
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigError(
            f"{str(file)!r} describes a {kind!r}, which is no causal language model in "
            f"transformers {transformers.__version__}; choose one that is, such as gpt2 or llama"
        )
    return config


class HuggingFaceCausalLM(nn.Module):
    """A causal language model of transformers that returns the loss for targets given apart."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean fp32 cross entropy of int64 [batch, length] tokens and targets."""
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
