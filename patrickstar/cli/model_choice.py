"""Which model the command line trains: a preset, or an architecture from a Hugging Face config.

Both come out as a callable that builds a module with the interface of `patrickstar.models.GPT`:
`loss = module(tokens, targets)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from patrickstar.cli.hugging_face import read_config
from patrickstar.errors import ConfigError, PatrickStarError
from patrickstar.models import GPT, PRESETS, preset

DEFAULT_MODEL = "gpt-tiny"
LONGEST_DEFAULT_SEQUENCE = 512
_LONGEST_REASON = 400  # characters of another's message
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


def choose(model: str | None, hf_config: Path | None, *, checkpointing: bool) -> ModelChoice:
    """What `--model` and `--hf-config` ask for; the smallest preset if neither is given.

    Raises:
        ConfigError: both are given, or the one that is cannot be used.
    """
    if hf_config is not None and model is not None:
        raise ConfigError("--model and --hf-config exclude each other; give one of the two")
    if hf_config is not None:
        return from_hugging_face(hf_config, checkpointing=checkpointing)
    return from_preset(model or DEFAULT_MODEL, checkpointing=checkpointing)


def preset_names(started: str) -> list[str]:
    """The presets whose names a shell may complete `started` to."""
    return [name for name in PRESETS if name.startswith(started)]


def sequence_length(asked: int | None, choice: ModelChoice) -> int:
    """The tokens of a sequence: `asked`, or as many as the model takes, within reason.

    Raises:
        ConfigError: the model does not take as many.
    """
    longest = choice.positions
    if asked is None:
        return min(longest or LONGEST_DEFAULT_SEQUENCE, LONGEST_DEFAULT_SEQUENCE)
    if longest is not None and asked > longest:
        raise ConfigError(
            f"--sequence-length {asked} is longer than the {longest} positions of {choice.name}; "
            "shorten it"
        )
    return asked


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
    """The causal language model that a `config.json` describes, with random weights.

    Args:
        file: that file, or the folder it is in.
        checkpointing: recompute activations in the backward, as the model itself does it.

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
    if file.is_dir():
        file = file / "config.json"
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
        try:
            model: Any = auto.from_config(config, dtype=torch.float32)
            if checkpointing:
                _recompute(model)
        except PatrickStarError:
            raise  # a budget that is too small for the model, say
        except (ArithmeticError, AttributeError, ImportError, LookupError) as error:
            raise _unusable(file, f"{type(error).__name__}: {error}") from error
        except (RuntimeError, TypeError, ValueError) as error:
            raise _unusable(file, str(error)) from error
        return HuggingFaceCausalLM(model)

    positions = getattr(config, "max_position_embeddings", None)
    return ModelChoice(
        f"{config.model_type} from {file}", build, positions if isinstance(positions, int) else None
    )


def _read(file: Path, transformers: Any) -> Any:
    content = read_config(file)
    kind = content.pop("model_type")
    try:
        config = transformers.AutoConfig.for_model(kind, **content)
    except Exception as error:  # of the many classes that transformers and its parts have
        raise _unusable(file, str(error)) from error
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigError(
            f"{str(file)!r} describes a {kind!r}, which is no causal language model in "
            f"transformers {transformers.__version__}; choose one that is, such as gpt2 or llama"
        )
    return config


def _unusable(file: Path, why: str) -> ConfigError:
    why = " ".join(why.split()).rstrip(".")
    if len(why) > _LONGEST_REASON:  # such as one that goes on to name every architecture there is
        why = why.partition(". ")[0][:_LONGEST_REASON]
    return ConfigError(
        f"{str(file)!r} is no Hugging Face config that transformers can use: {why}. "
        "Give the config.json of a causal language model"
    )


def _recompute(model: Any) -> None:
    """Turn recomputation on, under the name that this version of transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    enable = enable or model.gradient_checkpointing_enable  # its older name
    enable({"use_reentrant": False})


class HuggingFaceCausalLM(nn.Module):
    """A causal language model of transformers that returns the loss for targets given apart."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean fp32 cross entropy of int64 [batch, length] tokens and targets."""
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
