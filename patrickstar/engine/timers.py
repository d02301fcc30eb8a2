"""How long the parts of a step took, under the names of DeepSpeed's `wall_clock_breakdown`.

Times are the caller's, in milliseconds. An accelerator works behind the caller, so it is waited for
at both ends, which costs the overlap that is being measured; that is why this is off by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PARTS = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")


class StepTimers:
    """Adds up the time of forwards, backwards and steps.

    Args:
        synchronize: waits for what was begun on the device.
        clock: seconds.
    """

    def __init__(
        self,
        synchronize: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._synchronize, self._clock = synchronize, clock
        self._micro = dict.fromkeys(_PARTS, 0.0)  # of this micro-batch
        self._all = dict.fromkeys(_PARTS, 0.0)  # since the last update
        self.latest: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time inside to "fwd", "bwd", "bwd_inner" or "step".

        What a backward takes beyond autograd's own is "bwd_allreduce": reductions that are not
        over when autograd is.
        """
        self._synchronize()
        began = self._clock()
        yield
        self._synchronize()
        milliseconds = (self._clock() - began) * 1e3
        self._add(part, milliseconds)
        if part in ("bwd", "bwd_inner"):
            self._add("bwd_allreduce", milliseconds if part == "bwd" else -milliseconds)

    def _add(self, part: str, milliseconds: float) -> None:
        self._micro[part] += milliseconds
        self._all[part] += milliseconds

    def take(self, *, updated: bool) -> tuple[dict[str, float], dict[str, float] | None]:
        """The times of the micro-batch that is over, and those of the update if it was one."""
        micro = {f"{part}_microstep": spent for part, spent in self._micro.items()}
        whole = dict(self._all)
        self.latest = {**micro, **whole}
        self._micro = dict.fromkeys(_PARTS, 0.0)
        if not updated:
            return micro, None
        self._all = dict.fromkeys(_PARTS, 0.0)
        return micro, whole
