"""Children that are watched from outside: their memory, their time, and how they end.

A child is a fork of a process that has imported everything and has no threads, so that it starts in
milliseconds. Its memory is what the kernel says of it (`/proc/PID/status`): anonymous and shared
pages, without those of program files. What it had when it said that it is ready is its base.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Key = TypeVar("Key")
Work = Callable[[Callable[[], None]], Any]
"""What a child does. It calls its argument when everything up to now is its base."""

INTERVAL = 0.003  # seconds between two looks at a child's memory


def all_of(function: Callable[..., Any], *arguments: Any) -> Work:
    """`function(*arguments)` in a child: nothing it does belongs to its base."""

    def work(ready: Callable[[], None]) -> Any:
        ready()
        return function(*arguments)

    return work


@dataclass
class Outcome:
    """How a child ended.

    Attributes:
        value: what its work returned, as JSON; None if it did not come to that.
        error: what it raised, or how it died.
        peak: bytes, the most above its base that was seen.
        looks: how often its memory was looked at.
    """

    value: Any = None
    error: str | None = None
    peak: int = 0
    looks: int = 0


def resident(pid: int) -> int | None:
    """Anonymous and shared bytes of a process that are in memory; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = 0
    for line in text.splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            found += int(line.split()[1]) * 1024
    return found


class _Child:
    def __init__(self, work: Work, limit: float) -> None:
        self.answer, out = os.pipe()
        go, self.go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.answer)
            os.close(self.go)
            _be_child(work, out, go)
        os.close(out)
        os.close(go)
        self.until = time.monotonic() + limit
        self.limit = limit
        self.text = b""
        self.base: int | None = None
        self.outcome = Outcome()

    def look(self) -> bool:
        """Look once; whether it is over."""
        ready, _, _ = select.select([self.answer], [], [], 0)
        if ready:
            data = os.read(self.answer, 1 << 16)
            if not data:
                self._end()
                return True
            if self.base is None and data[:1] == b"R":
                self.base, data = resident(self.pid), data[1:]
                os.write(self.go, b"G")
            self.text += data
        elif self.base is not None and (now := resident(self.pid)) is not None:
            self.outcome.peak = max(self.outcome.peak, now - self.base)
            self.outcome.looks += 1
        if time.monotonic() > self.until:
            os.kill(self.pid, signal.SIGKILL)
            self._end()
            self.outcome.value = None
            self.outcome.error = f"it hung: no end after {self.limit:.0f} s"
            return True
        return False

    def _end(self) -> None:
        os.close(self.answer)
        os.close(self.go)
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(ValueError):
            answer = json.loads(self.text.removeprefix(b"R"))
            self.outcome.value, self.outcome.error = answer.get("value"), answer.get("error")
            return
        self.outcome.error = f"it ended with status {code} and no answer"


def _be_child(work: Work, out: int, go: int) -> None:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

        def ready() -> None:
            os.write(out, b"R")
            os.read(go, 1)

        try:
            answer: dict[str, Any] = {"value": work(ready)}
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-3:]
            places = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(where))
            answer = {"error": f"{type(error).__name__}: {str(error)[:600]} ({places})"}
        data = json.dumps(answer).encode()
        while data:
            data = data[os.write(out, data) :]
        code = 0
    finally:
        os._exit(code)


def run_all(
    jobs: Iterable[tuple[Key, Work]], *, workers: int, limit: float
) -> Iterator[tuple[Key, Outcome]]:
    """Run every job in a child of its own, `workers` at a time; each may take `limit` seconds."""
    waiting: deque[tuple[Key, Work]] = deque(jobs)
    running: list[tuple[Key, _Child]] = []
    while waiting or running:
        while waiting and len(running) < workers:
            key, work = waiting.popleft()
            running.append((key, _Child(work, limit)))
        for entry in list(running):
            if entry[1].look():
                running.remove(entry)
                yield entry[0], entry[1].outcome
        time.sleep(INTERVAL)


def run_one(work: Work, limit: float) -> Outcome:
    """Run one job in a child and wait for it."""
    ((_, outcome),) = run_all([(0, work)], workers=1, limit=limit)
    return outcome
