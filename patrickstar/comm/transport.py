"""The seam between chunk collectives and `torch.distributed`: what a transport has to do.

A transport works for one group of ranks and blocks until its part is done (on an accelerator:
until it is queued on the current stream). It runs on a lane, which makes it asynchronous. There
are two:

- `DirectTransport` (CPUs): point-to-point messages, partial sums in rank order;
- `NativeTransport` (NCCL and other accelerator backends): the backend's own collectives.

A layout says who holds what, so that the same two calls serve sharded chunks (all-gather,
reduce-scatter) and owned chunks (broadcast from the owner, reduce to the owner).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from patrickstar.comm.call import Turn
from patrickstar.comm.errors import CommValueError
from patrickstar.comm.layout import Layout

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]
"""Returns an uninitialised 1-D tensor of that many elements; the seam for an arena of buffers."""


def allocate_empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The default `Allocate`: a fresh uninitialised tensor."""
    return torch.empty(numel, dtype=dtype, device=device)


class NetworkFailure(Exception):
    """The backend gave up on a message: a peer is gone, or the deadline has passed."""


@dataclass(frozen=True)
class Reduction:
    """How contributions become a result: `sum(x_r / predivide) / postdivide`.

    Contributions are divided and rounded to `wire` before they travel; the sum is kept in
    `sum_dtype(wire)` and divided there, and rounded once to the dtype of the result.

    Attributes:
        wire: the communication dtype.
        predivide: divides every contribution, against overflow in 16 bits.
        postdivide: divides the sum.
    """

    wire: torch.dtype
    predivide: float = 1.0
    postdivide: float = 1.0

    @classmethod
    def of(
        cls,
        op: str,
        ranks: int,
        wire: torch.dtype,
        predivide: float | None,
        postdivide: float | None,
    ) -> Reduction:
        """Return the reduction for `op` over `ranks` ranks.

        `"sum"` divides only as told. `"avg"` divides by `ranks` in total: after the sum, or before
        it by `predivide` and after it by `ranks / predivide`.

        Raises:
            CommValueError: an unknown op, a factor that is not positive, an average that is also
                told how to divide afterwards, or a division of integers.
        """
        if op not in ("sum", "avg"):
            raise CommValueError(f"op {op!r} is unknown; use 'sum' or 'avg'")
        if op == "avg" and postdivide is not None:
            raise CommValueError("op 'avg' chooses postdivide itself; use op='sum' to choose it")
        before = 1.0 if predivide is None else float(predivide)
        if op == "avg":
            after = ranks / before if before > 0 else 0.0
        else:
            after = 1.0 if postdivide is None else float(postdivide)
        if before <= 0 or after <= 0:
            raise CommValueError(
                f"predivide={predivide} and postdivide={postdivide} must be positive"
            )
        if not wire.is_floating_point and (before != 1.0 or after != 1.0):
            raise CommValueError(f"{wire} cannot be divided; sum it, or pass a floating dtype=")
        return cls(wire, before, after)

    def __str__(self) -> str:
        factors = ((self.predivide, "first"), (self.postdivide, "at last"))
        divided = [f"divided by {factor:g} {when}" for factor, when in factors if factor != 1.0]
        return ", ".join(["summed", *divided])

    def before_only(self) -> Reduction:
        """The first half of a two-level reduction: divide and sum, leave the rest."""
        return Reduction(self.wire, self.predivide, 1.0)

    def after_only(self) -> Reduction:
        """The second half: contributions are divided already."""
        return Reduction(self.wire, 1.0, self.postdivide)


def sum_dtype(wire: torch.dtype) -> torch.dtype:
    """Return the dtype sums are kept in: float32 for 16-bit floats, else `wire` itself."""
    if wire.is_floating_point and wire.itemsize < 4:
        return torch.float32
    return wire


def to_wire(source: torch.Tensor, out: torch.Tensor, predivide: float) -> None:
    """Write `source / predivide` to `out`, rounding once where `out` is the narrower dtype."""
    if predivide == 1.0:
        out.copy_(source)
    elif source.dtype.is_floating_point and source.dtype.itemsize >= out.dtype.itemsize:
        torch.div(source, predivide, out=out)
    else:
        out.copy_(source).div_(predivide)


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share a storage; the caller then treats them as overlapping."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class Transport(Protocol):
    """Blocking collectives within one group. `rank` and layouts count inside the group."""

    @property
    def rank(self) -> int:
        """This rank's place in the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def all_gather(
        self, turn: Turn, full: torch.Tensor, own: torch.Tensor | None, layout: Layout
    ) -> None:
        """Fill `full[:layout.numel]` on every rank from the parts the ranks hold.

        `own` is this rank's part in any dtype (None: it is already in place in `full`). What
        travels has the dtype of `full`.
        """

    def reduce_scatter(
        self,
        turn: Turn,
        full: torch.Tensor,
        own: torch.Tensor,
        layout: Layout,
        reduction: Reduction,
    ) -> None:
        """Write this rank's part of the reduction of `full` over ranks to `own`.

        `own` may be this rank's own range of `full`; the rest of `full` is left as it was.
        """

    def all_reduce(self, turn: Turn, buffer: torch.Tensor, reduction: Reduction) -> None:
        """Replace `buffer` by its reduction over ranks, the same bits on every rank."""
