"""An interrupt at the n-th line of the package, as a signal could bring it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import patrickstar

_PACKAGE = str(Path(patrickstar.__file__).parent)


class Lines:
    """Counts the lines of the package that the main thread runs, and interrupts one of them.

    Attributes:
        seen: lines so far.
        where: the file and the line that was interrupted, if one was.
    """

    def __init__(self, interrupt_at: int | None, among: str = "") -> None:
        self.seen = 0
        self.where: tuple[str, int] | None = None
        self._at, self._folder = interrupt_at, f"{_PACKAGE}/{among}"

    def trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(self._folder):
            return None
        if event == "line":
            self.seen += 1
            if self.seen - 1 == self._at:
                self.where = (Path(frame.f_code.co_filename).name, frame.f_lineno)
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
