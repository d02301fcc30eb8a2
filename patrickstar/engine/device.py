"""Where a run computes, and what of that device's memory no chunk owns.

On a CPU the memory beside chunks is what live tensors take, counted operator by operator. The
allocator of an accelerator knows more, kernels' workspaces among it, and knows the peak inside an
operator; where it can be asked, the larger of both figures counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from patrickstar.errors import ConfigError

_LEFT_FREE = 0.1  # of an accelerator's memory: contexts, fragments, libraries


def device_named(name: str) -> torch.device | None:
    """The accelerator called `name`, with this process's place on the machine; None for the CPU.

    Args:
        name: "auto" for the accelerator if there is one, "cpu", or a device such as "cuda:1".

    Raises:
        ConfigError: there is no such device.
    """
    there = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        if there is None:
            return None
        return torch.device(there.type, int(os.environ.get("LOCAL_RANK", "0")))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"patrickstar.device: {name!r} is no device ({error})") from error
    if device.type == "cpu":
        return None
    if there is None or there.type != device.type:
        found = "no accelerator" if there is None else f"{there.type!r}"
        raise ConfigError(
            f"patrickstar.device: {name!r} is asked for, and PyTorch finds {found}; "
            "use 'auto' or 'cpu'"
        )
    return torch.device(device.type, device.index or 0)


def free_budget(device: torch.device) -> int | None:
    """The budget of a device that was given none: most of what is free, in bytes."""
    if device.type == "cpu":
        return None
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free * (1 - _LEFT_FREE))


def allocated_peak(device: torch.device) -> Callable[[], int] | None:
    """What tells the most bytes that `device` gave out at once since it was asked last."""
    if device.type == "cpu":
        return None

    def peak() -> int:
        most = torch.accelerator.max_memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        return int(most)

    return peak


def move_unmanaged(module: nn.Module, device: torch.device) -> None:
    """Move what chunks do not hold to `device`: buffers, and parameters of odd kinds."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)
        for parameter in owner._parameters.values():
            if type(parameter) is nn.Parameter:
                parameter.data = parameter.data.to(device)
