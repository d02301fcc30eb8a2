"""Tagged point-to-point messages over a gloo group of our own, with deadlines.

A communicator sends from its own thread while the caller may use any registered group, so it must
not share one. `torch.distributed.new_group` cannot serve here: it needs ranks outside the group to
take part, or names groups by their ranks alone, so that a second communicator of the same ranks
would meet the first one's addresses. So the group is a `ProcessGroupGloo` made directly, under a
store prefix that is never used twice.

A message arrives only at a receive with the same tag, whose size must then be the same too (a
longer message would abort the process inside gloo, which is why tags say the size, see `call.py`).
A wait past its deadline breaks the connections of the whole group on this rank, and so tells every
rank connected to it.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from patrickstar.comm.call import Turn
from patrickstar.comm.transport import NetworkFailure

_NEVER_SENT = 0x7FFFFFFF


class PointToPoint(Protocol):
    """What is needed of a `torch.distributed` backend; ranks count inside its group."""

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> dist.Work:
        """Start sending."""

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> dist.Work:
        """Start receiving."""


class Messages:
    """Sends and receives flat CPU tensors among `ranks`.

    Args:
        backend: a gloo backend whose i-th rank is `ranks[i]`, used by nobody else.
        ranks: global ranks.
        rank: this global rank.
    """

    def __init__(self, backend: PointToPoint, ranks: Sequence[int], rank: int) -> None:
        self._backend = backend
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._others = [other for other in ranks if other != rank]

    def send(self, part: torch.Tensor, rank: int, tag: int) -> dist.Work:
        """Start sending `part` (1-D, contiguous) to global `rank`.

        Raises:
            NetworkFailure: the connection is broken.
        """
        return _started(lambda: self._backend.send([part], self._places[rank], tag))

    def receive(self, part: torch.Tensor, rank: int, tag: int) -> dist.Work:
        """Start receiving `part` (1-D, contiguous) from global `rank`.

        Raises:
            NetworkFailure: the connection is broken.
        """
        return _started(lambda: self._backend.recv([part], self._places[rank], tag))

    def break_connections(self) -> None:
        """Make every wait of this rank, and soon those of its peers, fail.

        gloo cannot abort a wait, but a receive that times out closes all connections of its group.
        """
        if not self._others:
            return
        with contextlib.suppress(RuntimeError):
            peer = self._places[self._others[0]]
            never = self._backend.recv([torch.empty(1)], peer, _NEVER_SENT)
            never.wait(datetime.timedelta(milliseconds=1))


def finish(turn: Turn, posted: Sequence[dist.Work]) -> None:
    """Wait until all messages have arrived or left.

    Raises:
        NetworkFailure: a peer is gone, or the turn's deadline has passed.
    """
    for work in posted:
        try:
            work.wait(datetime.timedelta(seconds=turn.left()))
        except RuntimeError as error:
            raise NetworkFailure(_first_line(error)) from error


def connect(
    store: c10d.Store, ranks: Sequence[int], rank: int, timeout: datetime.timedelta
) -> Messages:
    """Connect `ranks` with each other; called on all of them.

    Args:
        store: where they find each other; its keys must be fresh.
        ranks: global ranks, the same list on all of them.
        rank: this global rank.
        timeout: how long to wait for the others.

    Raises:
        RuntimeError: a rank did not come.
    """
    backend = dist.ProcessGroupGloo(store, list(ranks).index(rank), len(ranks), timeout)
    # The stubs of torch lack the methods that Backend has in Python.
    return Messages(cast(PointToPoint, backend), ranks, rank)


def _started(start: Callable[[], dist.Work]) -> dist.Work:
    try:
        return start()
    except RuntimeError as error:
        raise NetworkFailure(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    """gloo's messages begin with a source path in brackets and end with a joke."""
    text = str(error).split("] ", 1)[-1]
    return text.split(". This is typically", 1)[0].strip() or type(error).__name__
