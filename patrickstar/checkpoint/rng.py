"""The random state of a process: Python's, NumPy's, and PyTorch's on every device."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from patrickstar.checkpoint.plain import decode, encode
from patrickstar.errors import CheckpointError


def rng_state() -> dict[str, Any]:
    """The state of all global generators, as JSON."""
    name, keys, place, has_gauss, gauss = numpy.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": (str(name), keys.tobytes(), int(place), int(has_gauss), float(gauss)),  # type: ignore[union-attr]
        "cpu": torch.get_rng_state(),
    }
    kind, devices = _accelerators()
    if kind:
        state[kind] = [torch.get_device_module(kind).get_rng_state(d) for d in range(devices)]
    return {key: encode(value, f"rng.{key}") for key, value in state.items()}


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue with the states that `rng_state` gave.

    Devices that were not there when it was taken keep the states they have.

    Raises:
        CheckpointError: a state is missing or damaged.
    """
    now = "python"
    try:
        found = {key: decode(value, f"rng.{key}") for key, value in state.items()}
        version, internal, gauss = found["python"]
        random.setstate((version, internal, gauss))
        now = "numpy"
        name, keys, place, has_gauss, cached = found["numpy"]
        words = numpy.frombuffer(keys, dtype=numpy.uint32)
        numpy.random.set_state((name, words, place, has_gauss, cached))
        now = "cpu"
        torch.set_rng_state(found["cpu"])
        now, devices = _accelerators()
        for device, value in zip(range(devices), found.get(now, []), strict=False):
            torch.get_device_module(now).set_rng_state(value, device)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"the random state of {now!r} in the checkpoint is missing or damaged"
        ) from error


def _accelerators() -> tuple[str, int]:
    accelerator = torch.accelerator.current_accelerator() if _has_accelerator() else None
    return ("", 0) if accelerator is None else (accelerator.type, torch.accelerator.device_count())


def _has_accelerator() -> bool:
    return torch.accelerator.is_available()
