"""From a dict or a JSON file to a `Config`, or to one `ConfigError` that says what to change."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from patrickstar.config import batch, legacy, precision
from patrickstar.config.check import check
from patrickstar.config.explain import told
from patrickstar.config.model import Config
from patrickstar.config.source import read
from patrickstar.config.warning import Notes
from patrickstar.config.zero import disk_tier
from patrickstar.errors import ConfigError


def load_config(
    config: Mapping[str, Any] | str | os.PathLike[str], *, world_size: int = 1
) -> Config:
    """Check `config` and return it resolved and frozen.

    Args:
        config: a dict, which is not changed, or the path of a JSON file.
        world_size: data-parallel ranks, for the batch sizes.

    Raises:
        ConfigError: the file is missing or no JSON; a key is unknown, refused or given twice; a
            value is of the wrong type or out of range; or sections contradict each other.

    Warns:
        ConfigWarning: once, of all keys that have no effect here and all old names.
    """
    notes = Notes()
    try:
        loaded = _load(config, world_size, notes)
    except RecursionError:
        raise ConfigError("the config is nested too deeply, or contains itself") from None
    notes.tell()
    return loaded


def _load(
    config: Mapping[str, Any] | str | os.PathLike[str], world_size: int, notes: Notes
) -> Config:
    raw = read(config)
    if isinstance(raw.get("zero_optimization"), bool):
        stage = int(raw["zero_optimization"])
        raw["zero_optimization"] = {"stage": stage}
        notes.add("zero_optimization", f"true and false are old; write {{'stage': {stage}}}")
    legacy.remark_on_clipping(raw, notes)
    kept = check(raw, notes)
    for name in batch.NAMES:
        if kept.get(name, 0) is None:
            del kept[name]
    try:
        loaded = Config.model_validate(kept)
    except ValidationError as error:
        raise ConfigError("\n".join(told(error))) from None
    precision.check(loaded.fp16, loaded.bf16, loaded.data_types)
    train, micro, steps = (getattr(loaded, one) if one in kept else None for one in batch.NAMES)
    triple = batch.resolve(train, micro, steps, world_size)
    memory = loaded.patrickstar.memory
    disk = disk_tier(loaded.zero_optimization, memory, notes)
    return loaded.model_copy(
        update={
            **dict(zip(batch.NAMES, triple, strict=True)),
            "patrickstar": loaded.patrickstar.model_copy(
                update={"memory": memory.model_copy(update={"disk": disk})}
            ),
        }
    )
