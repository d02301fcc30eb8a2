"""Copies that run beside the computation.

A few threads carry chunks between tiers; system calls and large copies release the interpreter
lock, so they overlap with operators. The books are kept by the main thread alone: a thread here
only moves bytes and says when it is done.

The main thread may be interrupted anywhere, also between handing a copy over and noting that it
did. So every copy is noted first, and whoever *claims* it first, the thread that carries it out or
`give_up`, decides whether it runs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from patrickstar.workers import Flag, Workers

AT_ONCE = 2  # copies; see docs/architecture.md for what other numbers took


@dataclass(frozen=True)
class Transfer:
    """A chunk on its way from the tier `source` to the tier `target`."""

    chunk: int
    source: int
    target: int


@dataclass(frozen=True)
class Completion:
    """A transfer that ended; `error` is what stopped it, or None.

    `began` and `ended` are when its bytes moved, by `time.perf_counter`.
    """

    transfer: Transfer
    error: BaseException | None
    began: float = 0.0
    ended: float = 0.0


@dataclass(eq=False)
class _Copy:
    transfer: Transfer
    carry: Callable[[], None]
    done: queue.SimpleQueue[tuple[_Copy, Completion]]
    claim: threading.Lock = field(default_factory=threading.Lock)
    ended: Flag = field(default_factory=Flag)


class TransferThreads:
    """Runs copies on `threads` threads and hands back their completions in the order they end."""

    def __init__(self, threads: int = AT_ONCE) -> None:
        self._workers = Workers(threads, "patrickstar-transfer")
        self._done: queue.SimpleQueue[tuple[_Copy, Completion]] = queue.SimpleQueue()
        self._copies: dict[_Copy, None] = {}  # handed over and not handed back

    def start(self, transfer: Transfer, copy: Callable[[], None]) -> None:
        noted = _Copy(transfer, copy, self._done)
        self._copies[noted] = None
        self._workers.start(partial(_run, noted))

    def poll(self) -> Completion | None:
        """The next completion if there is one already."""
        try:
            copy, completion = self._done.get_nowait()
        except queue.Empty:
            return None
        self._copies.pop(copy, None)
        return completion

    def wait(self) -> Completion:
        """The next completion; blocks until there is one."""
        copy, completion = self._done.get()
        self._copies.pop(copy, None)
        return completion

    def give_up(self) -> None:
        """No copy runs any more when this returns, and no completion is handed back."""
        for copy in list(self._copies):
            if not copy.claim.acquire(blocking=False):
                copy.ended.wait()
        self._done = queue.SimpleQueue()
        self._copies.clear()

    def close(self) -> None:
        """Let running copies end and stop the threads."""
        self._workers.close()


def _run(copy: _Copy) -> None:
    # Knows nothing of who handed it over: threads must not keep what nobody else refers to.
    if not copy.claim.acquire(blocking=False):
        return  # given up
    error: BaseException | None = None
    began = time.perf_counter()
    try:
        copy.carry()
    except BaseException as caught:  # handed to the main thread, which raises it
        error = caught
    copy.done.put((copy, Completion(copy.transfer, error, began, time.perf_counter())))
    copy.ended.set()  # after it was handed back: `give_up` leaves that queue behind
