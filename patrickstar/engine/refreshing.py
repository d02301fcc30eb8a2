"""Parameters that every rank keeps whole, of which it has updated its own part.

At stages 1 and 2 the other parts come from the other ranks, chunk by chunk; one chunk travels while
the next one is updated.
"""

from __future__ import annotations

import torch

from patrickstar.comm import Work
from patrickstar.engine.aligned import AlignedChunks
from patrickstar.engine.in_flight import InFlight
from patrickstar.engine.ranks import Ranks
from patrickstar.memory import Access, ChunkManager, Use


class Refresher:
    """Brings the parts of parameter chunks that other ranks have updated."""

    def __init__(self, manager: ChunkManager, ranks: Ranks) -> None:
        self._manager, self._ranks = manager, ranks
        self._in_flight = InFlight(manager, overlap=ranks.overlap)

    def start(self, aligned: AlignedChunks) -> None:
        """This rank's part of the parameters is new; begin to bring the rest."""
        parameter = aligned.parameter

        def begin() -> Work:
            with torch.no_grad():
                flat = self._manager.tensor(parameter)
                return self._ranks.gather(f"parameter {aligned.name}", flat)

        self._in_flight.start(aligned, [Use(parameter.id, Access.UPDATE)], begin)

    def finish(self) -> None:
        """Wait until all of them are complete."""
        self._in_flight.finish()
