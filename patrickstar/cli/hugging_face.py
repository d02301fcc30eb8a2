"""What a Hugging Face `config.json` says, and about a model's weights without making them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from patrickstar.errors import ConfigError


@dataclass(frozen=True)
class Architecture:
    """The weights of a model.

    Attributes:
        name: of its class.
        shapes: of parameters and persistent buffers, by name.
        tied: for each name of a weight that has several, all of them.
    """

    name: str
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, list[str]]


def read_config(file: Path) -> dict[str, Any]:
    """The contents of a `config.json`, or of the one in a folder.

    Raises:
        ConfigError: it cannot be read, or is no config of a model.
    """
    file = file / "config.json" if file.is_dir() else file
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the Hugging Face config {str(file)!r} cannot be read ({error.strerror}); "
            "give a config.json or the folder it is in"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{str(file)!r} is no JSON ({error}); give the config.json of a model"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ConfigError(
            f'{str(file)!r} is no Hugging Face config: it has no "model_type"; '
            "give the config.json of a model"
        )
    return content


def architecture_of(config: Mapping[str, Any], file: Path) -> Architecture:
    """The model that `config`, the contents of `file`, describes.

    Raises:
        ConfigError: transformers is missing, or cannot make a model of it.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "--hf needs the package transformers; install it with `pip install 'patrickstar[hf]'`, "
            "or leave --hf out to write safetensors without a config"
        ) from error
    fields = {key: value for key, value in config.items() if key != "model_type"}
    try:
        made = transformers.AutoConfig.for_model(config["model_type"], **fields)
        names = config.get("architectures") or []
        kind: Any = getattr(transformers, names[0], None) if names else None
        auto: Any = transformers.AutoModelForCausalLM
        with torch.device("meta"):
            model = auto.from_config(made) if kind is None else kind(made)
    except Exception as error:  # of the many classes that transformers and its parts have
        why = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"transformers {transformers.__version__} can make no model of {str(file)!r}: {why}. "
            'Give the config.json of a model, with its class in "architectures"'
        ) from error
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    return Architecture(
        type(model).__name__,
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        {name: names for names in by_tensor.values() if len(names) > 1 for name in names},
    )
