"""The one error of the communication library.

A collective that cannot finish is reported with the collective, the chunk and the ranks, since
"connection closed by peer" tells a user of a thousand ranks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from patrickstar.errors import PatrickStarError


class CommError(PatrickStarError, RuntimeError):
    """A collective failed, timed out, or was asked for in a way that cannot work.

    Attributes:
        collective: what was running, for example `"reduce-scatter"`; empty when nothing was.
        chunk: the name of its chunk, or of all chunks of a coalesced call; empty when nothing was.
        ranks: the global ranks at fault as far as they are known, in rising order. Empty when the
            fault is in the call itself or when nobody could be found out.
    """

    def __init__(
        self, message: str, *, collective: str = "", chunk: str = "", ranks: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.collective = collective
        self.chunk = chunk
        self.ranks = tuple(sorted(ranks))


class CommValueError(CommError, ValueError):
    """A call that cannot work, found on this rank before anything was sent."""
