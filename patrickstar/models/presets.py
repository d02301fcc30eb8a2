"""GPTs by name, from one that trains in seconds to one that needs more than most machines have.

All read bytes (a vocabulary of 256), so that any file is training data and no tokenizer is needed.
"""

from __future__ import annotations

import difflib
from types import MappingProxyType

from patrickstar.errors import ConfigError
from patrickstar.models.gpt import GPTConfig

PRESETS = MappingProxyType(
    {
        "gpt-tiny": GPTConfig(layers=4, width=128, heads=4, positions=256),
        "gpt-25m": GPTConfig(layers=8, width=512, heads=8),
        "gpt-300m": GPTConfig(layers=24, width=1024, heads=16),
        "gpt-1b": GPTConfig(layers=20, width=2048, heads=16, positions=1024),
        "gpt-4b": GPTConfig(layers=32, width=3200, heads=25, positions=1024),
    }
)


def preset(name: str) -> GPTConfig:
    """The configuration called `name`.

    Raises:
        ConfigError: there is none of that name; the message says which there are.
    """
    try:
        return PRESETS[name]
    except KeyError:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(
            f"there is no model preset {name!r}{hint}; the presets are {', '.join(PRESETS)}"
        ) from None
