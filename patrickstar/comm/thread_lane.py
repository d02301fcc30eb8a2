"""The lane of CPU groups: one thread.

The thread is the CPU's side stream: it waits for messages (without holding the interpreter lock)
and adds partial sums while the caller computes. It is a daemon, so a stuck network never keeps a
process from ending.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from patrickstar.comm.call import Call, Turn
from patrickstar.comm.counters import CommCounters
from patrickstar.comm.errors import CommError
from patrickstar.comm.lane import Explain, Job
from patrickstar.comm.progress import Progress
from patrickstar.comm.work import HostWork


class _Queued(NamedTuple):
    call: Call
    job: Job
    work: HostWork
    buffers: tuple[torch.Tensor, ...]


class ThreadLane:
    """Runs jobs on a thread of its own.

    Args:
        timeout: seconds that one job may take.
        progress: told which call runs.
        counters: given the seconds and bytes of each call.
        explain: called on the thread with what a job raised.
    """

    def __init__(
        self, timeout: float, progress: Progress, counters: CommCounters, explain: Explain
    ) -> None:
        self._timeout = timeout
        self._progress = progress
        self._counters = counters
        self._explain = explain
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[int, HostWork] = {}
        self._idle = threading.Condition(self._lock)
        self._running = 0
        self._error: CommError | None = None
        self._thread = threading.Thread(target=self._run, name="patrickstar-comm", daemon=True)
        self._thread.start()

    def submit(self, call: Call, job: Job, buffers: Sequence[torch.Tensor]) -> HostWork:
        work = HostWork(call, self._counters)
        with self._lock:
            if self._error is not None:
                raise _not_run(call, self._error)
            self._open[call.seq] = work
        self._queue.put(_Queued(call, job, work, tuple(buffers)))
        return work

    def fail(self, error: CommError) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            for seq, work in self._open.items():
                running = seq == self._running
                work.finish(self._error if running else _not_run(work.call, self._error))
            self._open.clear()
            self._idle.notify_all()

    def drain(self, timeout: float) -> bool:
        with self._lock:
            return self._idle.wait_for(lambda: not self._open, timeout)

    def poll(self) -> None:
        """Nothing to do: the thread notices."""

    def close(self) -> None:
        with self._lock:
            if self._error is None:
                self._error = CommError("the communicator is closed")
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(self._timeout)

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            if queued.work.done():  # failed while it was queued
                continue
            self._run_one(queued.call, queued.job, queued.work)
            del queued  # or its buffers would live until the next call

    def _run_one(self, call: Call, job: Job, work: HostWork) -> None:
        with self._lock:
            self._running = call.seq
        self._progress.start(call)
        turn = Turn.start(call, self._timeout)
        begun = time.perf_counter()
        try:
            job(turn)
        except BaseException as raised:
            # Whatever it was, this rank has dropped out of a collective: nothing can follow.
            self.fail(self._explain(call, raised))
            return
        self._counters.ran(call, begun, time.perf_counter(), sent_bytes=turn.sent_bytes)
        self._progress.finish(call)
        with self._lock:
            self._open.pop(call.seq, None)
            work.finish()
            self._idle.notify_all()


def _not_run(call: Call, error: CommError) -> CommError:
    return CommError(
        f"{call} was not run: {error}",
        collective=call.collective,
        chunk=call.chunk,
        ranks=error.ranks,
    )
