"""The few stream operations that the lane of accelerators needs.

A seam of its own so that the lane's ordering and buffer lifetimes can be tested on a machine
without an accelerator.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Streams(Protocol):
    """Creates and switches streams of one device."""

    def new_stream(self) -> torch.Stream:
        """Return a new stream."""

    def current(self) -> torch.Stream:
        """Return the stream the caller queues work on."""

    def record(self, stream: torch.Stream) -> torch.Event:
        """Return an event at the end of what `stream` holds now."""

    def use(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Queue work on `stream` inside the context."""


class AcceleratorStreams:
    """`Streams` of the accelerator that `torch.accelerator` reports."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self) -> torch.Stream:
        return torch.Stream(device=self._device)

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def record(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(stream)
        return event

    def use(self, stream: torch.Stream) -> AbstractContextManager[object]:
        return stream
