"""Tables as Markdown has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table whose first column is text and whose others are numbers."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" + " ---: |" * (len(head) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
