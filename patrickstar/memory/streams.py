"""Copies beside the computation of an accelerator.

What is copied may still be computed, and what lay in the target may still be read, by work that the
host has queued already. So a copy waits for the *mark* of the stream that computes, made when the
copy was prepared, and runs on a stream of its own; the thread that makes it waits for its end.
Whoever uses the copy afterwards queues work that begins later, so nothing else is synchronised.

A seam of its own, so that tiers of an accelerator can be tested on a machine without one.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Copies(Protocol):
    """Copies tensors between CPU memory and one device."""

    def mark(self) -> Any:
        """The end of what is queued for computation now; called on the caller's thread."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, mark: Any) -> None:
        """Copy after `mark` was reached; complete on return. Called on a transfer thread."""
        ...


class DirectCopies:
    """For devices whose operators are complete when they return: CPU memory."""

    def mark(self) -> None:
        return None

    def copy(self, target: torch.Tensor, source: torch.Tensor, mark: None) -> None:
        target.copy_(source)


class StreamCopies:
    """For accelerators: a stream for each direction, as their links are full duplex."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loading, self._saving = torch.Stream(device=device), torch.Stream(device=device)

    def mark(self) -> torch.Event:
        event = torch.Event(device=self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def copy(self, target: torch.Tensor, source: torch.Tensor, mark: torch.Event) -> None:
        stream = self._loading if target.device.type == self._device.type else self._saving
        with stream:
            stream.wait_event(mark)
            target.copy_(source, non_blocking=True)
            done = torch.Event(device=self._device)
            done.record(stream)
        done.synchronize()
