"""One collective that was asked for, and what every rank must agree on about it.

`tag` is the trick that keeps a mismatch from becoming corruption: it goes into the message
envelope of every point-to-point message of the call, so two ranks exchange bytes only when their
place in the sequence, collective, chunk, element count and dtype agree. Ranks that disagree never
match, and the watch (`presence.py`) sees two different tags at one place and says so.
"""

from __future__ import annotations

import enum
import time
import zlib
from dataclasses import dataclass, field


class Kind(str, enum.Enum):
    """Two independent sequences: chunks on the lane, and small control messages of the caller."""

    DATA = "data"
    CONTROL = "control"


@dataclass(frozen=True)
class Call:
    """What was asked for.

    Attributes:
        kind: which sequence it belongs to.
        seq: its place in that sequence, from 1.
        collective: its name, for example `"all-gather"`.
        chunk: the name of its chunk or, when coalesced, of all of them.
        numel: elements of the full buffer.
        dtype: the dtype that travels, as text.
        detail: whatever else ranks must agree on, for example `"from rank 2"`.
    """

    kind: Kind
    seq: int
    collective: str
    chunk: str
    numel: int
    dtype: str
    detail: str = ""

    @property
    def tag(self) -> int:
        """31 bits: sequence (1), place (11), hash of the rest (19). Neighbours always differ."""
        agreed = (self.collective, self.chunk, self.numel, self.dtype, self.detail)
        described = repr(agreed).encode()
        sequence = 0 if self.kind is Kind.DATA else 1
        return sequence << 30 | (self.seq & 0x7FF) << 19 | zlib.crc32(described) & 0x7FFFF

    def __str__(self) -> str:
        if self.kind is Kind.CONTROL:
            return f"{self.collective} ({self.numel} x {self.dtype}, control #{self.seq})"
        detail = f", {self.detail}" if self.detail else ""
        return (
            f"{self.collective} of chunk {self.chunk!r} "
            f"({self.numel} x {self.dtype}{detail}, #{self.seq})"
        )


@dataclass
class Turn:
    """A call while it runs.

    Attributes:
        tag: the envelope of its messages.
        deadline: `time.monotonic()` at which it has failed.
        sent_bytes: bytes this rank has handed to the network so far.
    """

    tag: int
    deadline: float
    sent_bytes: int = 0

    @classmethod
    def start(cls, call: Call, timeout: float) -> Turn:
        """Start `call` now, with `timeout` seconds to finish."""
        return cls(call.tag, time.monotonic() + timeout)

    def left(self) -> float:
        """Seconds left, never less than a millisecond (zero means "no limit" to some backends)."""
        return max(self.deadline - time.monotonic(), 0.001)


@dataclass
class Place:
    """The next place in a sequence."""

    kind: Kind
    seq: int = field(default=0)

    def next(self, collective: str, chunk: str, numel: int, dtype: str, detail: str = "") -> Call:
        """Take the next place."""
        self.seq += 1
        return Call(self.kind, self.seq, collective, chunk, numel, dtype, detail)
