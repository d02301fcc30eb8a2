"""Handles of collectives that run asynchronously."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from patrickstar.comm.call import Call
from patrickstar.comm.counters import CommCounters
from patrickstar.comm.errors import CommError
from patrickstar.workers import Flag


class Work(Protocol):
    """A collective that was asked for."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the result may be used.

        On a CPU that is when the collective has finished. On an accelerator the current stream is
        made to wait and the host goes on; with a `timeout` the host waits too.

        Without a `timeout` the wait still ends: every collective has the communicator's timeout
        from its start.

        Args:
            timeout: seconds; None leaves it to the communicator's timeout.

        Raises:
            CommError: the collective failed, or has not finished within `timeout` (which leaves
                it running and the communicator usable).
        """

    def done(self) -> bool:
        """Whether the collective has finished or failed."""


class HostWork:
    """The handle of a call that another thread finishes."""

    def __init__(self, call: Call, counters: CommCounters) -> None:
        self.call = call
        self._counters = counters
        self._finished = Flag()
        self._error: CommError | None = None

    def finish(self, error: CommError | None = None) -> None:
        """Mark the call finished, or failed. Only the first call counts."""
        if not self._finished.is_set():
            self._error = error
            self._finished.set()

    def wait(self, timeout: float | None = None) -> None:
        if not self._finished.is_set():
            start = time.perf_counter()
            self._finished.wait(timeout)
            self._counters.waited(self.call, start, time.perf_counter())
        if not self._finished.is_set():
            raise CommError(
                f"{self.call} has not finished within {timeout} s",
                collective=self.call.collective,
                chunk=self.call.chunk,
            )
        if self._error is not None:
            raise CommError(
                str(self._error),
                collective=self.call.collective,
                chunk=self.call.chunk,
                ranks=self._error.ranks,
            ) from self._error

    def done(self) -> bool:
        return self._finished.is_set()


class AllOf:
    """The handle of several collectives; waits for them in order."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = tuple(works)

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            work.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def done(self) -> bool:
        return all(work.done() for work in self._works)
