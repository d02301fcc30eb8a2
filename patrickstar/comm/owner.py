"""The memory-saving mode: every chunk is held whole by one rank, one chunk travels at a time."""

from __future__ import annotations

from collections.abc import Mapping

from patrickstar.comm.by_layout import ByLayout
from patrickstar.comm.communicator import Communicator
from patrickstar.comm.errors import CommValueError
from patrickstar.comm.layout import OwnedLayout


class OwnerComm(ByLayout):
    """`ChunkComm` with owners.

    The owner sends a chunk to every other rank and receives every rank's contribution, so its link
    carries `N - 1` times the chunk; spread ownership evenly (`layout.assign_owners`).

    Args:
        comm: the communicator.
        owners: for each chunk, which rank of the copy (0 to shard size - 1) holds it; the same
            mapping on every rank.

    Raises:
        CommValueError: an owner that is no rank of the copy.
    """

    def __init__(self, comm: Communicator, owners: Mapping[str, int]) -> None:
        super().__init__(comm)
        self._owners = dict(owners)
        for owner in self._owners.values():
            OwnedLayout(0, comm.shard.size, owner)  # refuses a rank outside

    def layout(self, chunk: str, numel: int) -> OwnedLayout:
        owner = self._owners.get(chunk)
        if owner is None:
            raise CommValueError(
                f"chunk {chunk!r} has no owner; the chunks with owners are {sorted(self._owners)}",
                chunk=chunk,
            )
        return OwnedLayout(numel, self._comm.shard.size, owner)
