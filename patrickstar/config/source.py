"""Reading a config: a dict is copied, a file is JSON without duplicate keys."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patrickstar.errors import ConfigError


def read(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """The config as plain dicts and lists that share nothing with `config`.

    Raises:
        ConfigError: the file is missing or unreadable, is not JSON, repeats a key, or what comes
            out is no object.
    """
    if isinstance(config, Mapping):
        return _copy_object(config, "")
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"a config is a dict or the path of a JSON file, not {type(config).__name__}"
        )
    path = Path(config)
    parsed = _parse(_text(path), path)
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(parsed).__name__}")
    return _copy_object(parsed, "")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"config file {str(path)!r} does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error}") from error


def _parse(text: str, path: Path) -> Any:
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _without_duplicates(pairs, path))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}; comments, which "
            "DeepSpeed's reader allows, are not JSON"
        ) from error
    except ConfigError:
        raise
    except ValueError as error:  # a number with too many digits
        raise ConfigError(f"{path}: not valid JSON: {error}") from error


def _without_duplicates(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(
            f"{path}: key {', '.join(map(repr, twice))} occurs more than once in one object; "
            "keep one"
        )
    return made


def _copy_object(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, inner in value.items():
        if not isinstance(key, str):
            raise ConfigError(f"{where or 'config'}: the key {key!r} is no string")
        made[key] = _copy(inner, f"{where}.{key}" if where else key)
    return made


def _copy(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return _copy_object(value, where)
    if isinstance(value, list | tuple):
        return [_copy(inner, where) for inner in value]
    return value
