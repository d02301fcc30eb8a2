"""Collectives that run beside the computation, with their chunks held where they are.

One more than there may be waits for the first: how much memory is held does not depend on how fast
a network is, and the memory manager sees the same uses in every iteration.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from patrickstar.comm import Work
from patrickstar.errors import PatrickStarError
from patrickstar.memory import ChunkManager, Use
from patrickstar.memory.lease import Lease


def _nothing() -> None: ...


@dataclass(frozen=True)
class _Running:
    what: Any
    lease: Lease
    work: Work
    then: Callable[[], None]
    afterwards: Callable[[], None]


class InFlight:
    """Collectives on chunks of `manager` that run one after the other.

    Args:
        overlap: without it, each is waited for at once.
    """

    def __init__(self, manager: ChunkManager, *, overlap: bool) -> None:
        self._manager, self._overlap = manager, overlap
        self._running: deque[_Running] = deque()  # oldest first

    def has(self, what: Any) -> bool:
        """Whether one that was called `what` runs now."""
        return any(running.what is what for running in self._running)

    def start(
        self,
        what: Any,
        uses: Sequence[Use],
        begin: Callable[[], Work],
        then: Callable[[], None] = _nothing,
        afterwards: Callable[[], None] = _nothing,
        most: int = 1,
    ) -> None:
        """Finish what is too many, bring the chunks of `uses`, and `begin`.

        Args:
            what: names it.
            then: called when the collective is over, with the chunks still there.
            afterwards: called when they are free again.
            most: how many may be begun and not finished, with this one.
        """
        while len(self._running) >= most:
            self._finish_oldest()
        lease = self._manager.use(uses)
        lease.__enter__()
        try:
            self._running.append(_Running(what, lease, begin(), then, afterwards))
        except BaseException:
            lease.__exit__(None, None, None)
            raise
        if not self._overlap:
            self.finish()

    def finish(self) -> None:
        """Wait for everything that is running, if anything is.

        Raises:
            CommError: it failed.
        """
        while self._running:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        running = self._running.popleft()
        try:
            running.work.wait()
            running.then()
        finally:
            running.lease.__exit__(None, None, None)
        running.afterwards()

    def abandon(self) -> None:
        """Something went wrong: end what is running, whatever becomes of it."""
        while self._running:
            running = self._running.popleft()
            with contextlib.suppress(PatrickStarError):
                running.work.wait()
            running.lease.__exit__(None, None, None)
