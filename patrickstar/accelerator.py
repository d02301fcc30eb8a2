"""`deepspeed.accelerator`: the device a script asks for, under DeepSpeed's names.

Scripts call `get_accelerator().device_name()` to place their inputs and `.empty_cache()` or
`.synchronize()` around what they measure. The answer is the device the engine computes on.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from patrickstar.engine.device import device_named

__all__ = ["Accelerator", "get_accelerator"]


@dataclass(frozen=True)
class Accelerator:
    """The device a run computes on."""

    device_type: str = "cpu"
    index: int = 0

    def device_name(self, device_index: int | None = None) -> str:
        """``"cpu"``, or the accelerator's type with the index, if one is given."""
        if device_index is None or self.device_type == "cpu":
            return self.device_type
        return f"{self.device_type}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int:
        return self.index

    def current_device_name(self) -> str:
        """The name that inputs are placed with: ``tensor.to(current_device_name())``."""
        return self.device_type if self.device_type == "cpu" else self.device_name(self.index)

    def set_device(self, device_index: int) -> None:
        """Accepted: a process has one device."""

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return self.device_type == "cpu"

    def communication_backend_name(self) -> str:
        """The backend of `torch.distributed` for this device."""
        return "gloo" if self.device_type == "cpu" else "nccl"

    def synchronize(self, device_index: int | None = None) -> None:
        if self.device_type != "cpu":
            torch.accelerator.synchronize()

    def empty_cache(self) -> None:
        """Accepted: chunks recycle their memory."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def random(self) -> Any:
        return torch.random

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of memory the process has; `engine.memory_report()` has those of every tier."""
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most it had so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Accepted; `engine.reset_peak()` is what begins a new peak."""

    def total_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]


def get_accelerator() -> Accelerator:
    """The device of this process's runs."""
    device = device_named("auto")
    return Accelerator() if device is None else Accelerator(device.type, device.index)
