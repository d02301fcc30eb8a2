"""Which call each sequence of this rank is at; what the watch publishes and looks at."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from patrickstar.comm.call import Call, Kind


@dataclass(frozen=True)
class Mark:
    """The last call that was started in a sequence.

    Attributes:
        seq: its place; 0 before the first.
        tag: its tag.
        label: the call, for people.
        running: whether it has not finished yet.
        since: `time.monotonic()` of its start.
    """

    seq: int = 0
    tag: int = 0
    label: str = "nothing"
    running: bool = False
    since: float = 0.0


class Progress:
    """The marks of this rank, written by the lane and the caller, read by the watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks = {kind: Mark() for kind in Kind}

    def start(self, call: Call) -> None:
        """`call` starts now."""
        with self._lock:
            self._marks[call.kind] = Mark(call.seq, call.tag, str(call), True, time.monotonic())

    def finish(self, call: Call) -> None:
        """`call` has finished."""
        with self._lock:
            mark = self._marks[call.kind]
            if mark.seq == call.seq:
                self._marks[call.kind] = replace(mark, running=False)

    def marks(self) -> dict[Kind, Mark]:
        """Return the marks."""
        with self._lock:
            return dict(self._marks)
