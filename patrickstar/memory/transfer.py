"""Copies that run beside the computation.

A few threads carry chunks between tiers; system calls and large copies release the interpreter
lock, so they overlap with operators. The books are kept by the main thread alone: a thread here
only moves bytes and says when it is done.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """A chunk on its way from the tier `source` to the tier `target`."""

    chunk: int
    source: int
    target: int


@dataclass(frozen=True)
class Completion:
    """A transfer that ended; `error` is what stopped it, or None."""

    transfer: Transfer
    error: BaseException | None


class TransferThreads:
    """Runs copies on `threads` threads and hands back their completions in the order they end."""

    def __init__(self, threads: int = 4) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="patrickstar-transfer")
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()

    def start(self, transfer: Transfer, copy: Callable[[], None]) -> None:
        self._pool.submit(self._run, transfer, copy)

    def _run(self, transfer: Transfer, copy: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            copy()
        except BaseException as caught:  # handed to the main thread, which raises it
            error = caught
        self._done.put(Completion(transfer, error))

    def poll(self) -> Completion | None:
        """The next completion if there is one already."""
        try:
            return self._done.get_nowait()
        except queue.Empty:
            return None

    def wait(self) -> Completion:
        """The next completion; blocks until there is one."""
        return self._done.get()

    def close(self) -> None:
        """Let running copies end and stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=False)
