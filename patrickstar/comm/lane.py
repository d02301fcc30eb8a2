"""What runs collectives one after the other, in the order they were asked for.

A communicator has one lane. First in, first out is what keeps the order the same on every rank;
overlap is between the lane and the caller's compute, not between two collectives, which would only
share the same link. There are two: `ThreadLane` for CPUs and `StreamLane` for accelerators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from patrickstar.comm.call import Call, Turn
from patrickstar.comm.errors import CommError
from patrickstar.comm.work import Work

Job = Callable[[Turn], None]
"""The blocking part of a collective: transport calls and copies."""

Explain = Callable[[Call, BaseException], CommError]
"""Turns what a job raised into the error users see, and stops the communicator."""


class Lane(Protocol):
    """Runs jobs in order."""

    def submit(self, call: Call, job: Job, buffers: Sequence[torch.Tensor]) -> Work:
        """Queue `job`; `buffers` are what it reads and writes, kept alive until it has finished.

        Raises:
            CommError: the lane has stopped.
        """

    def fail(self, error: CommError) -> None:
        """Stop: what runs and what is queued ends with `error`, now."""

    def drain(self, timeout: float) -> bool:
        """Wait until all queued jobs have finished; False when `timeout` seconds were too few."""

    def poll(self) -> None:
        """Notice jobs that have finished since; called by the watch from its thread."""

    def close(self) -> None:
        """Stop after the running job; end the lane's thread, if it has one."""
