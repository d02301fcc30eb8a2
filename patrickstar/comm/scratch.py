"""Reused staging buffers, so that a hot loop never asks the system for fresh pages.

One tensor per role and dtype, grown when a call needs more and kept. Only one call at a time may
use an instance: a transport runs on one lane.
"""

from __future__ import annotations

import torch

from patrickstar.comm.transport import Allocate


class Scratch:
    """Staging buffers of one transport."""

    def __init__(self, allocate: Allocate, device: torch.device) -> None:
        self._allocate = allocate
        self._device = device
        self._kept: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, role: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `numel` uninitialised elements, valid until the next `take` of the same role."""
        kept = self._kept.get((role, dtype))
        if kept is None or kept.numel() < numel:
            kept = self._kept[role, dtype] = self._allocate(numel, dtype, self._device)
        return kept[:numel]

    @property
    def bytes(self) -> int:
        """Bytes kept."""
        return sum(kept.numel() * kept.dtype.itemsize for kept in self._kept.values())
