"""An interrupt waits for the end of the optimizer's step.

A step that ends in the middle leaves some weights of this step and some of the one before. No
checkpoint can be saved of that, so nothing of the run could be used any more except its last
checkpoint. A forward or backward that ends early can just be run again. So a user's Ctrl-C (and a
termination that Python code handles) is noted while the step runs and acted on right after it. The
second one is acted on at once; then the engine refuses to go on from what the step left.

Handlers of signals run on the main thread; elsewhere there is nothing to hold back.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_log = logging.getLogger("patrickstar")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptsAfterwards:
    """Holds back the first interrupt until the end of a `with`."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._noted: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        if self._noted is not None and error is None:
            number, frame = self._noted
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is not None:
            self._handlers[number](number, frame)
        else:
            self._noted = number, frame
            _log.warning(
                "interrupted: the optimizer step is completed first, so that the weights are those "
                "of one step; interrupt again to stop at once"
            )
