"""Real gloo groups for tests: a pool of processes that all tests share.

Starting a process costs seconds, a process group milliseconds; so processes are kept and each run
gets a group of its own, over a file store (no ports). A process that a test kills is replaced.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PATIENCE = 60.0


class Died:
    """The answer of a rank whose process ended during the run."""


class RankPool:
    """Runs a function on several ranks and returns what each returned."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = 0
        self._workers: list[tuple[subprocess.Popen[bytes], Connection] | None] = []

    def run(self, function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        """Run `function(rank, size, *arguments)` on `size` ranks at once.

        Returns:
            The answers in rank order; `Died` for a rank whose process ended.
        """
        self._start(size)
        self._runs += 1
        store = str(self._folder / f"store-{self._runs}")
        path, name = function.__code__.co_filename, function.__name__
        workers = [worker for worker in self._workers[:size] if worker is not None]
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((path, name, rank, size, store, arguments))
        deadline = time.monotonic() + PATIENCE
        answers = [self._answer(rank, deadline) for rank in range(size)]
        failures = [
            f"rank {rank}:\n{answer[1]}"
            for rank, answer in enumerate(answers)
            if isinstance(answer, tuple) and not answer[0]
        ]
        assert not failures, "\n".join(failures)
        return [answer[1] if isinstance(answer, tuple) else answer for answer in answers]

    def _answer(self, rank: int, deadline: float) -> Any:
        worker = self._workers[rank]
        assert worker is not None
        process, pipe = worker
        try:
            if pipe.poll(max(deadline - time.monotonic(), 0.0)):
                return pickle.loads(pipe.recv_bytes())
            answer: Any = (False, f"no answer within {PATIENCE} s")
        except (EOFError, ConnectionResetError):
            answer = Died()
        process.kill()
        process.wait()
        self._workers[rank] = None
        return answer

    def _start(self, size: int) -> None:
        """Start the processes that are missing, all at once."""
        self._workers += [None] * (size - len(self._workers))
        starting = []
        for rank in range(size):
            if self._workers[rank] is None:
                address = str(self._folder / f"pipe-{rank}-{self._runs}")
                listener = Listener(address, family="AF_UNIX")
                # Without the barrier a rank that has its connections may leave the group while
                # another still makes its own, and that one dies: "Connection closed by peer".
                environment = os.environ | {
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(ROOT),
                    "TORCH_DIST_INIT_BARRIER": "1",
                }
                process = subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("rank_worker.py")), address],
                    env=environment,
                )
                starting.append((rank, listener, process))
        for rank, listener, process in starting:
            self._workers[rank] = (process, listener.accept())
            listener.close()

    def close(self) -> None:
        for worker in self._workers:
            if worker is not None:
                worker[1].send(None)
        for worker in self._workers:
            if worker is not None:
                try:
                    worker[0].wait(20)
                except subprocess.TimeoutExpired:
                    worker[0].kill()
