"""Bytes and seconds per collective.

Three byte counts, because they answer different questions, and all are *per rank*:

- `payload_bytes`: the size S of the full buffer in the dtype that travels. What the caller asked.
- `wire_bytes`: what one rank sends in the ring model that papers and bandwidth tables use (Thakur,
  Rabenseifner, Gropp, IJHPCA 19(1), 2005; NCCL's "bus bandwidth"), with N ranks:
  all-gather, reduce-scatter and broadcast `(N-1)/N * S`, all-reduce `2 (N-1)/N * S`. A hybrid
  collective adds the terms of its two groups: reduce-scatter over N ranks and then all-reduce
  over M copies is `(N-1)/N * S + 2 (M-1)/M * S/N`. For the memory-saving mode it is the mean over
  ranks, since only the owner sends (all-gather) or receives (reduce-scatter).
- `sent_bytes`: what this rank really handed to the network. Known for the point-to-point transport
  that CPUs use; 0 under NCCL, which does not tell.

Two times, in seconds: `busy_seconds`, how long the collectives ran from their first to their last
byte (waiting for slower ranks included), and `waited_seconds`, how long callers were blocked in
`wait()`. What was hidden behind compute is the difference. On an accelerator a `wait()` only
orders streams, so `waited_seconds` stays near zero there.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from patrickstar.comm.call import Call
from patrickstar.comm.order import Collective


def ring_bytes(collective: Collective, payload: int, ranks: int) -> int:
    """Return the bytes one rank sends for `payload` bytes over `ranks` ranks in the ring model."""
    passes = 2 if collective is Collective.ALL_REDUCE else 1
    return passes * payload * (ranks - 1) // ranks


@dataclass(frozen=True)
class CollectiveTotals:
    """Totals of one kind of collective since the start or the last reset. Bytes and seconds."""

    calls: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    sent_bytes: int = 0
    busy_seconds: float = 0.0
    waited_seconds: float = 0.0


class CommObserver(Protocol):
    """Hears what collectives did. Seconds are those of `time.perf_counter`."""

    def collective(self, name: str, chunk: str, nbytes: int, began: float, ended: float) -> None:
        """`name` ran on `nbytes` of `chunk`. Called on whichever thread noticed."""

    def waited(self, began: float, ended: float) -> None:
        """A caller of `wait` stood still."""


class CommCounters:
    """Totals per collective; safe to read while collectives run.

    Attributes:
        observer: is told of every collective as well, if there is one.
    """

    def __init__(self) -> None:
        self.observer: CommObserver | None = None
        self._lock = threading.Lock()
        self._totals: dict[Collective, CollectiveTotals] = {}

    def add(
        self,
        collective: Collective,
        *,
        calls: int = 0,
        payload_bytes: int = 0,
        wire_bytes: int = 0,
        sent_bytes: int = 0,
        busy_seconds: float = 0.0,
        waited_seconds: float = 0.0,
    ) -> None:
        """Add to the totals of `collective`."""
        with self._lock:
            old = self._totals.get(collective, CollectiveTotals())
            self._totals[collective] = replace(
                old,
                calls=old.calls + calls,
                payload_bytes=old.payload_bytes + payload_bytes,
                wire_bytes=old.wire_bytes + wire_bytes,
                sent_bytes=old.sent_bytes + sent_bytes,
                busy_seconds=old.busy_seconds + busy_seconds,
                waited_seconds=old.waited_seconds + waited_seconds,
            )

    def ran(self, call: Call, began: float, ended: float, *, sent_bytes: int = 0) -> None:
        """`call` ran from `began` to `ended`."""
        name = Collective(call.collective)
        self.add(name, busy_seconds=ended - began, sent_bytes=sent_bytes)
        if self.observer is not None:
            nbytes = call.numel * getattr(torch, call.dtype).itemsize
            self.observer.collective(call.collective, call.chunk, nbytes, began, ended)

    def waited(self, call: Call, began: float, ended: float) -> None:
        """A caller waited for `call`."""
        self.add(Collective(call.collective), waited_seconds=ended - began)
        if self.observer is not None:
            self.observer.waited(began, ended)

    def __getitem__(self, collective: Collective) -> CollectiveTotals:
        with self._lock:
            return self._totals.get(collective, CollectiveTotals())

    def snapshot(self) -> dict[str, CollectiveTotals]:
        """Return the totals of every collective that ran, by name."""
        with self._lock:
            return {str(name): totals for name, totals in self._totals.items()}

    def wire_bytes(self) -> int:
        """Return `wire_bytes` over all collectives."""
        with self._lock:
            return sum(totals.wire_bytes for totals in self._totals.values())

    def reset(self) -> None:
        """Start again from zero."""
        with self._lock:
            self._totals.clear()
