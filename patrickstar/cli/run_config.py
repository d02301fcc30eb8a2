"""The config of a run: a file, or defaults, and on top of it what the command line says.

The dict that comes out has DeepSpeed's keys and the section "patrickstar", as
`patrickstar.initialize_engine` takes it; that is also where it is checked.
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patrickstar.errors import ConfigError
from patrickstar.memory.sizes import parse_bytes

LEARNING_RATE = 3e-4
_WARM_UP_STEPS = 20


@dataclass(frozen=True)
class Overrides:
    """What the command line may change in a config; None leaves it as it is."""

    batch_size: int | None = None
    learning_rate: float | None = None
    device_memory: str | None = None
    host_memory: str | None = None
    disk: str | None = None
    record: Path | None = None


def run_config(file: Path | None, overrides: Overrides) -> dict[str, Any]:
    """The config in `file`, or the default one, with `overrides` in place.

    Raises:
        ConfigError: the file is missing or no JSON object, or an override cannot be applied to it.
    """
    config = _defaults() if file is None else read_config(file)
    if overrides.batch_size is not None:
        config["train_micro_batch_size_per_gpu"] = overrides.batch_size
        config.pop("train_batch_size", None)  # follows from the other two
    elif config.get("train_batch_size") is None:
        config.setdefault("train_micro_batch_size_per_gpu", 1)
    if overrides.learning_rate is not None:
        _set_learning_rate(config, overrides.learning_rate)
    for option, size in (
        ("--device-memory", overrides.device_memory),
        ("--host-memory", overrides.host_memory),
    ):
        _check_size(option, size)
    memory = {
        "device": overrides.device_memory,
        "host": overrides.host_memory,
        "disk": None if overrides.disk is None else disk_place(overrides.disk),
    }
    if overrides.record is not None:
        _section(config, "patrickstar")["record"] = str(overrides.record)
    given = {tier: value for tier, value in memory.items() if value is not None}
    if given:
        _section(config, "patrickstar", "memory").update(given)
    return config


def micro_batch_size(config: dict[str, Any]) -> int:
    """Sequences in a micro-batch, as the config has it; 1 if it does not say."""
    size = config.get("train_micro_batch_size_per_gpu")
    if size is None and isinstance(config.get("train_batch_size"), int):
        steps = config.get("gradient_accumulation_steps")
        size = config["train_batch_size"] // (steps if isinstance(steps, int) and steps > 0 else 1)
    return size if isinstance(size, int) and size > 0 else 1


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object in `file`."""
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the config file {str(file)!r} cannot be read ({error.strerror}); "
            "give a JSON file, or leave it out for the defaults"
        ) from error
    except ValueError as error:
        raise ConfigError(f"the config file {str(file)!r} is no JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"the config file {str(file)!r} holds a {type(loaded).__name__}; "
            'a config is an object such as {"bf16": {"enabled": true}}'
        )
    return loaded


def disk_place(place: str) -> dict[str, Any]:
    """ "PATH" or "PATH:SIZE" as the config writes it."""
    path, colon, size = place.rpartition(":")
    if colon and path and _is_size(size):
        return {"path": path, "size": size}
    if not place:
        raise ConfigError("the disk tier needs a folder: --disk PATH or --disk PATH:SIZE")
    return {"path": place}


def make_disk_folder(place: str) -> None:
    """Make the folder that `--disk` names, so that a wrong one is refused before anything is read.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    path = Path(disk_place(place)["path"]).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        why = "is, or lies under, a file and not a folder"
    except OSError as error:
        why = f"cannot be made ({error.strerror})"
    else:
        if os.access(path, os.W_OK | os.X_OK):
            return
        why = "cannot be written to"
    raise ConfigError(f"--disk {str(path)!r} {why}; give a folder that this user can write to")


def _check_size(option: str, size: str | None) -> None:
    if size is None or size.strip().lower() == "auto":
        return
    try:
        parse_bytes(size)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def _is_size(text: str) -> bool:
    try:
        parse_bytes(text)
    except ConfigError:
        return text == "auto"
    return True


def _defaults() -> dict[str, Any]:
    return copy.deepcopy(
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "weight_decay": 0.1},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {
                    "warmup_min_lr": LEARNING_RATE / _WARM_UP_STEPS,
                    "warmup_max_lr": LEARNING_RATE,
                    "warmup_num_steps": _WARM_UP_STEPS,
                    "warmup_type": "linear",
                },
            },
            "gradient_clipping": 1.0,
        }
    )


def _set_learning_rate(config: dict[str, Any], rate: float) -> None:
    _section(config, "optimizer", "params")["lr"] = rate
    scheduler = config.get("scheduler")
    if not scheduler:
        return
    params = _section(config, "scheduler", "params")
    highest = params.get("warmup_max_lr")
    if isinstance(highest, int | float) and highest > 0:
        lowest = params.get("warmup_min_lr", 0)
        params.update(warmup_min_lr=lowest * rate / highest, warmup_max_lr=rate)
    elif not str(scheduler.get("type")).startswith("Warmup"):  # those start from the optimizer's
        raise ConfigError(
            f"--learning-rate cannot be combined with the config's scheduler "
            f"{scheduler.get('type')!r}, which sets the rate itself; change it in the config"
        )


def _section(config: dict[str, Any], *path: str) -> dict[str, Any]:
    """The object at `path` in `config`, made where it is missing."""
    here = config
    for depth, key in enumerate(path, 1):
        inner = here.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{'.'.join(path[:depth])} in the config is {inner!r}; it must be an object"
            )
        here = inner
    return here
