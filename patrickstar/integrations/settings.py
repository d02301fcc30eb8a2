"""The engine's config, where a framework has arguments of its own for a part of it.

Configs that were written for DeepSpeed say "auto" where the framework's arguments decide; such keys
are left out, and the framework's values put in their place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from patrickstar.config.source import read
from patrickstar.errors import ConfigError

Config = Mapping[str, Any] | str | os.PathLike[str]
_PRECISIONS = {"no": None, "fp32": None, "bf16": "bf16", "fp16": "fp16"}


def read_config(config: Config | None) -> dict[str, Any]:
    """The config as a dict of its own."""
    if config is None:
        return {}
    return dict(read(dict(config) if isinstance(config, Mapping) else config))


def merged(raw: Mapping[str, Any], mixed_precision: str) -> dict[str, Any]:
    """`raw` with the precision that a framework asks for, and without clipping unless it says so.

    The loop clips under a framework, if anybody does; the engine's default would do it unasked.

    Raises:
        ConfigError: the precision is unknown, or `raw` asks for another.
    """
    config = dict(raw)
    if config.get("gradient_clipping") in (None, "auto"):
        config["gradient_clipping"] = 0.0
    if mixed_precision not in _PRECISIONS:
        raise ConfigError(
            f"mixed precision {mixed_precision!r} is none that the engine has; use one of "
            + ", ".join(map(repr, _PRECISIONS))
        )
    wanted = _PRECISIONS[mixed_precision]
    for name in ("bf16", "fp16"):
        section = config.get(name)
        if not isinstance(section, Mapping):
            continue
        section = {key: value for key, value in section.items() if value != "auto"}
        if section.get("enabled") is True and wanted not in (None, name):
            raise ConfigError(f"the config enables {name}, the framework's argument {wanted}")
        config[name] = section
    if wanted is not None:
        config[wanted] = {**config.get(wanted, {}), "enabled": True}
    return config
