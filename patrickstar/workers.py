"""Threads that an interrupt of the main thread cannot leave stuck.

Python runs the handler of a signal between any two instructions of the main thread, also inside the
conditions, events and executors of its library, which are written in Python. A lock that one of
them has taken and not noted yet stays taken then, and whoever needs it next waits for ever: three
of 150 runs that were interrupted again and again hung in `ThreadPoolExecutor.submit`. What is
written in C, `threading.Lock` and `queue.SimpleQueue`, is taken or it is not. All that is handed to
threads here, and back, goes through these two.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType


class Flag:
    """What `threading.Event` is, without taking it back."""

    def __init__(self) -> None:
        self._set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        self._set = True
        self._let_in()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for `timeout` seconds at most; whether it is."""
        # Whoever is interrupted between the next two lines keeps the lock, but then it is set.
        if not self._set and self._lock.acquire(timeout=-1 if timeout is None else timeout):
            self._let_in()
        return self._set

    def _let_in(self) -> None:
        with suppress(RuntimeError):  # another has done so
            self._lock.release()


class Task:
    """A call that a thread makes."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self._error: BaseException | None = None
        self._ended = Flag()

    def run(self) -> None:
        assert self._call is not None
        try:
            self._call()
        except BaseException as error:  # raised where it is waited for
            self._error = error
        self._call = None  # and all that it refers to
        self._ended.set()

    def wait(self) -> None:
        """Return when the call has; raise what it raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error


class Workers:
    """Threads that make calls in the order in which they were started.

    They end when this is closed or nobody refers to it, and before the process ends, after the
    calls that were started.

    Args:
        threads: how many.
        name: what debuggers call them.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._running: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, self._tasks, threads, self._running)
        for number in range(threads):
            thread = threading.Thread(
                target=_serve, args=(self._tasks,), name=f"{name}_{number}", daemon=True
            )
            thread.start()
            self._running.append(thread)  # one whose start was interrupted is not waited for

    def start(self, call: Callable[[], object]) -> Task:
        """Have `call` made by a thread.

        Raises:
            RuntimeError: after `close`.
        """
        if not self._end.alive:
            raise RuntimeError("these threads have ended: a call cannot be started after close()")
        task = Task(call)
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """Let what was started end, and end the threads."""
        self._end()
        _join(self._running)  # if that was interrupted the last time

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _serve(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # or it would live until the next one


def _end(
    tasks: queue.SimpleQueue[Task | None], threads: int, running: list[threading.Thread]
) -> None:
    for _ in range(threads):
        tasks.put(None)
    _join(running)


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        if thread is not threading.current_thread():  # the last reference may have died on one
            thread.join()
