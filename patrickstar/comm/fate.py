"""One error for all: what happens to a communicator when something cannot finish.

The first failure decides. It is published, so that the other ranks adopt it as theirs; everything
that runs or is queued on this rank ends with it; and connections are broken, so that no thread of
any rank stays blocked in a wait.
"""

from __future__ import annotations

import threading

from patrickstar.comm.call import Call, Kind
from patrickstar.comm.diagnosis import Verdict
from patrickstar.comm.errors import CommError
from patrickstar.comm.lane import Lane
from patrickstar.comm.messages import Messages
from patrickstar.comm.presence import Presence
from patrickstar.comm.progress import Mark
from patrickstar.comm.transport import NetworkFailure


class Fate:
    """Holds the error that stopped this rank's communicator, if any.

    `lane` and `presence` are set once, before anything runs: they are made with this object's
    methods.
    """

    lane: Lane
    presence: Presence

    def __init__(self, rank: int, messages: Messages) -> None:
        self._rank = rank
        self._messages = messages
        self._lock = threading.Lock()
        self._error: CommError | None = None

    @property
    def error(self) -> CommError | None:
        """The error that stopped this communicator, or None."""
        return self._error

    def check(self) -> None:
        """Raise the error that stopped this communicator, if any.

        Raises:
            CommError: there is one.
        """
        if self._error is not None:
            raise CommError(str(self._error), ranks=self._error.ranks) from self._error

    def explain(self, call: Call, raised: BaseException) -> CommError:
        """Stop because of what `call` raised, and return the error its waiters see.

        Called on the thread that failed. Takes a few beats when a peer is gone, to find out which.
        """
        if self._error is None:
            if isinstance(raised, NetworkFailure):
                mine = Mark(call.seq, call.tag, str(call), True)
                verdict = self.presence.diagnose(call.kind, mine, str(raised))
            else:
                name = type(raised).__name__
                verdict = Verdict((self._rank,), f"rank {self._rank} failed: {name}: {raised}")
            self._stop(f"{call} failed on rank {self._rank}: {verdict.reason}", verdict)
        assert self._error is not None
        return CommError(
            str(self._error),
            collective=call.collective,
            chunk=call.chunk,
            ranks=self._error.ranks,
        )

    def cannot_finish(self, kind: Kind, mine: Mark, verdict: Verdict) -> None:
        """Stop because a call that this rank waits in can never finish. On the watching thread."""
        self._stop(f"{mine.label} cannot finish on rank {self._rank}: {verdict.reason}", verdict)

    def give_up(self, raised: BaseException) -> None:
        """Stop because the caller has left with an exception and will take part no longer."""
        reason = f"rank {self._rank} stopped: {type(raised).__name__}: {raised}"
        self._stop(reason, Verdict((self._rank,), reason))

    def stumbled(self, raised: BaseException) -> None:
        """The caller met an exception and may or may not go on."""
        self.presence.stumbled(f"{type(raised).__name__}: {raised}")

    def end(self) -> None:
        """End the threads, without waiting for calls that have not finished."""
        if not self.lane.drain(0.0):
            reason = f"rank {self._rank} closed the communicator or ended with calls in flight"
            self._stop(reason, Verdict((self._rank,), reason))
        self.presence.leave()
        self.lane.close()

    def _stop(self, text: str, verdict: Verdict) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._error = CommError(text, ranks=verdict.ranks)
        self.presence.failed(verdict)
        self.lane.fail(self._error)
        self._messages.break_connections()
