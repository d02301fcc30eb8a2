"""Tagged point-to-point messages over a gloo group, with deadlines.

A message arrives only at a receive with the same tag, whose size must then be the same too (a
longer message would abort the process inside gloo, which is why tags say the size, see `call.py`).
A wait past its deadline breaks the connections of the whole group on this rank, and so tells every
rank connected to it; `break_connections` uses that to free a thread that is blocked in a wait.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from patrickstar.comm.call import Turn
from patrickstar.comm.transport import NetworkFailure

_NEVER_SENT = 0x7FFFFFFF


def send(group: dist.ProcessGroup, part: torch.Tensor, rank: int, tag: int) -> dist.Work:
    """Start sending `part` (1-D, contiguous, on the CPU) to global `rank`."""
    return _started(lambda: dist.isend(part, rank, group=group, tag=tag))


def receive(group: dist.ProcessGroup, part: torch.Tensor, rank: int, tag: int) -> dist.Work:
    """Start receiving `part` (1-D, contiguous, on the CPU) from global `rank`."""
    return _started(lambda: dist.irecv(part, rank, group=group, tag=tag))


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


def break_connections(group: dist.ProcessGroup, peer: int) -> None:
    """Make every wait of this rank in `group`, and soon those of its peers, fail.

    gloo has no abort, but a receive that times out closes all connections of its group.
    """
    with contextlib.suppress(RuntimeError):
        never = dist.irecv(torch.empty(1), peer, group=group, tag=_NEVER_SENT)
        if never is not None:
            never.wait(datetime.timedelta(milliseconds=1))


def _started(start: Callable[[], object]) -> dist.Work:
    try:
        work = start()
    except RuntimeError as error:
        raise NetworkFailure(_first_line(error)) from error
    assert isinstance(work, dist.Work), "this rank is not in the group it sends through"
    return work


def _first_line(error: BaseException) -> str:
    """gloo's messages begin with a source path in brackets and end with a joke."""
    text = str(error).split("] ", 1)[-1]
    return text.split(". This is typically", 1)[0].strip() or type(error).__name__
