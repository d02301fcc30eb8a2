"""How chunks are spread over ranks and brought together: the seam an engine is written against.

Two implementations, chosen once per run:

- `ShardedComm`: every rank holds one N-th of every chunk; all ranks gather and reduce together.
  Balanced in memory and traffic; small chunks are packed. The mode for speed.
- `OwnerComm`: every chunk is held whole by one rank, which broadcasts it when it is needed and
  receives its sum. One chunk at a time, never packed: a gather needs no memory besides the chunk
  itself, a reduction only the owner's few segments. The memory-saving mode.

Both give the same bits on CPUs. A third is a class with these methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from patrickstar.comm.coalesced import Part
from patrickstar.comm.layout import Layout
from patrickstar.comm.work import Work


class ChunkComm(Protocol):
    """Asynchronous collectives on chunks. All ranks call the same methods in the same order."""

    def layout(self, chunk: str, numel: int) -> Layout:
        """Return which elements of a chunk of `numel` elements each rank of the copy holds."""

    def all_gather(self, chunk: str, full: torch.Tensor, own: torch.Tensor | None = None) -> Work:
        """Fill `full` on every rank from the parts that ranks hold.

        Args:
            chunk: the chunk's name, the same on every rank.
            full: 1-D, contiguous, of the chunk's length; its dtype is what travels.
            own: 1-D, this rank's part as `layout` says, of any dtype; None: the part lies in its
                place in `full` already.

        Raises:
            CommValueError: a buffer of the wrong size, shape or device.
            CommError: the communicator has failed.
        """

    def reduce_scatter(
        self,
        chunk: str,
        full: torch.Tensor,
        own: torch.Tensor | None = None,
        *,
        op: str = "sum",
        predivide: float | None = None,
        postdivide: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Work:
        """Write this rank's part of the reduction of `full` over ranks to `own`.

        Args:
            chunk: the chunk's name, the same on every rank.
            full: 1-D, contiguous, this rank's contribution; left as it is, but for the own part
                when `own` is None.
            own: 1-D, this rank's part as `layout` says, of any dtype; None: into its place in
                `full`.
            op: "sum", or "avg" over all ranks (copies included).
            predivide: divides contributions before they travel, against overflow.
            postdivide: divides the sum; only with "sum", "avg" chooses it.
            dtype: the communication dtype; default: that of `full`.

        Raises:
            CommValueError: a buffer of the wrong size, shape or device, or factors that contradict.
            CommError: the communicator has failed.
        """

    def all_reduce(
        self,
        chunk: str,
        buffer: torch.Tensor,
        *,
        op: str = "sum",
        predivide: float | None = None,
        postdivide: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Work:
        """Replace `buffer` by its reduction over all ranks; arguments as `reduce_scatter`."""

    def broadcast(self, chunk: str, buffer: torch.Tensor, src: int) -> Work:
        """Copy `buffer` from global rank `src` to all ranks, copies included."""

    def all_gather_many(self, parts: Sequence[Part]) -> Work:
        """`all_gather` several chunks; the handle waits for all."""

    def reduce_scatter_many(
        self,
        parts: Sequence[Part],
        *,
        op: str = "sum",
        predivide: float | None = None,
        postdivide: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Work:
        """`reduce_scatter` several chunks; the handle waits for all."""
