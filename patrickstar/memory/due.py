"""Work that is due before chunks are used next.

Whoever owns chunks may put off a change to them (an optimizer's update, say) until somebody looks:
the manager does what is due before it gives a chunk out, so the delay cannot be seen. What is due
is bookkeeping here; the manager brings the chunks and calls the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from patrickstar.memory.trace import Use


@dataclass(eq=False)
class Due:
    """One piece of work.

    Attributes:
        chunks: those that must not be used before it is done.
        uses: what the work needs; brought and pinned while it runs.
        work: changes contents; called when everything is there. If an interrupt comes when it is
            over, it is called again, and has to know that.
        dead: chunks whose contents nobody needs afterwards.
        on_use: it is no change that is late, but contents that are made when they are wanted:
            whoever asks for all that is due does not ask for it.
        prepare: called before the work's chunks are brought, with the chunks that are about to be
            used.
        running: it has begun to bring its chunks.
        done: it is over, whatever an interrupt left of it here.
    """

    chunks: tuple[int, ...]
    uses: tuple[Use, ...]
    work: Callable[[], None]
    dead: tuple[int, ...] = ()
    on_use: bool = False
    prepare: Callable[[frozenset[int]], None] | None = None
    running: bool = False
    done: bool = False


class DueWork:
    """All that is due, by chunk; a chunk waits for at most one piece of work."""

    def __init__(self) -> None:
        self._of: dict[int, Due] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._of and not self._of[chunk].done

    def add(self, due: Due) -> None:
        assert not any(chunk in self for chunk in due.chunks), "one piece of work a chunk"
        self._of.update(dict.fromkeys(due.chunks, due))

    def remove(self, due: Due) -> None:
        due.done = True
        for chunk in due.chunks:
            if self._of.get(chunk) is due:
                del self._of[chunk]

    def before(self, uses: Sequence[Use]) -> list[Due]:
        """What has to be done before these uses, in their order."""
        return self.of(use.chunk for use in uses)

    def of(self, chunks: Iterable[int]) -> list[Due]:
        """What these chunks wait for."""
        found = dict.fromkeys(self._of[chunk] for chunk in chunks if chunk in self)
        return [due for due in found if not due.running]

    def all(self) -> list[Due]:
        """Every change that is late, in the order it was added."""
        return [due for due in self.of(list(self._of)) if not due.on_use]

    def drop(self, chunk: int) -> None:
        """What this chunk waits for will not be done."""
        if chunk in self._of:
            self.remove(self._of[chunk])
