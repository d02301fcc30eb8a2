"""From a dict or a JSON file to a `Config`, or to one clear `ConfigError`."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from patrickstar.config import batch
from patrickstar.config.model import Config
from patrickstar.config.types import Section
from patrickstar.errors import ConfigError


def load_config(
    config: Mapping[str, Any] | str | os.PathLike[str], *, world_size: int = 1
) -> Config:
    """Check `config` and return it resolved and frozen; the argument is not changed.

    Args:
        config: a dict, or the path of a JSON file.
        world_size: data-parallel ranks, for the batch triple.

    Raises:
        ConfigError: the file is missing or no JSON, a key is unknown, or a value does not fit.
    """
    given = _without_auto(dict(config) if isinstance(config, Mapping) else _read(Path(config)))
    _refuse_unknown(given, Config, "")
    try:
        loaded = Config.model_validate(given)
    except ValidationError as error:
        raise ConfigError(_told(error)) from None
    if loaded.fp16.enabled and loaded.bf16.enabled:
        raise ConfigError("fp16.enabled and bf16.enabled cannot both be true; choose one")
    triple = batch.resolve(
        *(
            getattr(loaded, name) if name in loaded.model_fields_set else None
            for name in (batch.TRAIN, batch.MICRO, batch.STEPS)
        ),
        world_size,
    )
    return loaded.model_copy(
        update={batch.TRAIN: triple.train, batch.MICRO: triple.micro, batch.STEPS: triple.steps}
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"the config file {path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"the config file {path} holds no JSON object")
    return content


def _without_auto(section: dict[str, Any]) -> dict[str, Any]:
    """A copy without the keys that are "auto", which means the default, or null sections."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if not (isinstance(value, str) and value == "auto")
    }


def _refuse_unknown(given: dict[str, Any], model: type[Section], path: str) -> None:
    names = {info.alias or name: info for name, info in model.model_fields.items()}
    for key, value in given.items():
        where = f"{path}{key}"
        if key not in names:
            near = difflib.get_close_matches(str(key), list(names), n=1)
            hint = f"; did you mean {path}{near[0]}?" if near else ""
            raise ConfigError(f"{where} is no key of the config{hint}")
        for inner in _sections(names[key].annotation):
            if isinstance(value, dict):
                _refuse_unknown(value, inner, f"{where}.")


def _sections(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in _sections(part)]


def _told(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    return f"{path}: {first['input']!r} does not fit: {first['msg']}"
