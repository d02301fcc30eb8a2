"""Lines of JSON from a file of any size, one in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

LONGEST = 1 << 20  # bytes of a line; what is longer was not written by a recording


def lines(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """The lines of `path` with the offset that each begins at; one that is too long comes cut."""
    with path.open("rb") as file:
        file.seek(start)
        while True:
            offset = file.tell()
            line = file.readline(LONGEST)
            if not line:
                return
            whole = line
            while len(line) == LONGEST and not line.endswith(b"\n"):
                line = file.readline(LONGEST)
            if whole.strip():
                yield offset, whole
