"""`deepspeed.checkpointing`: activation checkpointing under DeepSpeed's names.

It is `torch.utils.checkpoint`, which needs no configuration; where what a checkpointed region keeps
is put is said in the engine's config, under `activation_checkpointing`: see `engine.region_inputs`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.utils.checkpoint

from patrickstar.config import load_config

__all__ = ["checkpoint", "configure", "is_configured", "reset"]


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, computed again in the backward instead of being kept."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def configure(
    mpu_: Any = None,
    deepspeed_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    **settings: Any,
) -> None:
    """Accepted: the engine's own config is what counts. A config given here is checked.

    Raises:
        ConfigError: `deepspeed_config` cannot work.
    """
    if deepspeed_config is not None:
        load_config(deepspeed_config)


def is_configured() -> bool:
    """True: it always works."""
    return True


def reset() -> None:
    """Accepted: there are no buffers to empty."""
