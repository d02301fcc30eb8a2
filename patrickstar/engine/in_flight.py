"""One collective that runs beside the computation, with its chunks held where they are.

A second one waits for the first: how much memory is held does not depend on how fast a network is,
and the memory manager sees the same uses in every iteration.
"""

from __future__ import annotations

import contextlib
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
    """At most one collective on chunks of `manager`.

    Args:
        overlap: without it, each is waited for at once.
    """

    def __init__(self, manager: ChunkManager, *, overlap: bool) -> None:
        self._manager, self._overlap = manager, overlap
        self._running: _Running | None = None

    @property
    def what(self) -> Any:
        """What runs now, as it was called when it began; None if nothing does."""
        return None if self._running is None else self._running.what

    def start(
        self,
        what: Any,
        uses: Sequence[Use],
        begin: Callable[[], Work],
        then: Callable[[], None] = _nothing,
        afterwards: Callable[[], None] = _nothing,
    ) -> None:
        """Finish the one before, bring the chunks of `uses`, and `begin`.

        Args:
            what: names it.
            then: called when the collective is over, with the chunks still there.
            afterwards: called when they are free again.
        """
        self.finish()
        lease = self._manager.use(uses)
        lease.__enter__()
        try:
            self._running = _Running(what, lease, begin(), then, afterwards)
        except BaseException:
            lease.__exit__(None, None, None)
            raise
        if not self._overlap:
            self.finish()

    def finish(self) -> None:
        """Wait for what is running, if anything is.

        Raises:
            CommError: it failed.
        """
        if self._running is None:
            return
        running, self._running = self._running, None
        try:
            running.work.wait()
            running.then()
        finally:
            running.lease.__exit__(None, None, None)
        running.afterwards()

    def abandon(self) -> None:
        """Something went wrong: end what is running, whatever becomes of it."""
        if self._running is None:
            return
        running, self._running = self._running, None
        with contextlib.suppress(PatrickStarError):
            running.work.wait()
        running.lease.__exit__(None, None, None)
