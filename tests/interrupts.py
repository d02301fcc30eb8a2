"""An interrupt at the n-th line of the package, as a signal could bring it.

Python's own locks count too, where one of them is about to return to who called it: what a
condition or an executor has taken by then is not noted anywhere yet.
"""

from __future__ import annotations

import concurrent.futures
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import patrickstar

_PACKAGE = str(Path(patrickstar.__file__).parent)
_LOCKS = (threading.__file__, str(Path(concurrent.futures.__file__).parent))


class Lines:
    """Counts the lines of the package that the main thread runs, and interrupts one of them.

    Attributes:
        seen: lines so far, and returns from locks.
        where: the file and the line that was interrupted, if one was.
    """

    def __init__(self, interrupt_at: int | None, among: str = "") -> None:
        self.seen = 0
        self.where: tuple[str, int] | None = None
        self._at, self._folder = interrupt_at, f"{_PACKAGE}/{among}"

    def trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        counts = "line" if name.startswith(self._folder) else "return"
        if counts == "return" and not name.startswith(_LOCKS):
            return None
        if event == counts:
            self.seen += 1
            if self.seen - 1 == self._at:
                self.where = (Path(name).name, frame.f_lineno)
                raise KeyboardInterrupt
        return self.trace


@contextmanager
def interrupted_at(line: int | None, among: str = "") -> Iterator[Lines]:
    """Interrupt line number `line` of the package's folder `among`; None only counts them."""
    lines = Lines(line, among)
    before = sys.gettrace()
    sys.settrace(lines.trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
