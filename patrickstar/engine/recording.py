"""What happened when, for those who want to see it.

A `Recording` is handed to the memory manager and to the engine and hears from both: iterations and
their segments, moments, transfers, collectives, waits, evictions with their reasons. It keeps the
bytes in use of every tier by kind, and of the iterations it was asked for it keeps every event.
What it notes are plain dicts that go to `Sink` as each iteration ends; nothing is written while one
runs.

Times are seconds since the recording began, by `time.perf_counter`; tiers are named.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from patrickstar.memory import Plan
from patrickstar.memory.chunk import Chunk
from patrickstar.memory.observer import Why
from patrickstar.memory.trace import Use

FIRST, EVERY, MOST = 6, 100, 20  # iterations whose events are kept: the first, then some, at most
_MOST_PLANS, _LONGEST = 8, 80
_KINDS = ("parameter", "master", "gradient", "construction")
Event = dict[str, Any]


def kind_of(chunk: Chunk) -> str:
    """What a chunk holds: one of a few kinds, all optimizer states being "moments"."""
    return chunk.kind if chunk.kind in _KINDS else "moments"


class Sink(Protocol):
    """Takes what a recording has noted."""

    def events(self, events: Sequence[Event]) -> None:
        """The events of one iteration, in the order in which they were noted."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """An optimizer step was made."""

    def plan(self, plan: Plan) -> None:
        """A plan that iterations from now on name by its number, from 0 in this order."""


class Recording:
    """Watches one run; see `patrickstar.memory.observer.Observer` for the manager's part.

    Args:
        tiers: their names, fastest first.
        sink: takes what was noted.
        is_recorded: whether the events of a step are kept, by its number from 1.
        clock: seconds.

    Attributes:
        details: what the engine adds to the metrics of a step.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        sink: Sink,
        is_recorded: Callable[[int], bool] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tiers, self._sink, self._clock = list(tiers), sink, clock
        self._is_recorded = is_recorded or _some()
        self._zero = clock()
        self._bytes: list[dict[str, int]] = [{} for _ in tiers]
        self._totals = [0 for _ in tiers]
        self._largest: list[dict[str, int]] = [{} for _ in tiers]  # since the last moment
        self._largest_total = [0 for _ in tiers]
        self._peak = [0 for _ in tiers]  # since the last step
        self._chunks: dict[tuple[int, int], Chunk] = {}
        self._known: set[int] = set()
        self._plans: list[Plan] = []
        self._collectives: deque[Event] = deque()
        self._moved: dict[str, int] = {}
        self._events: list[Event] | None = None
        self._segment: tuple[str, float] | None = None
        self._losses: list[float] = []
        self._step, self._began = 1, 0.0
        self.details: Callable[[], Mapping[str, Any]] = dict

    # From the engine

    def began_iteration(self, plan: Plan | None) -> None:
        """An iteration begins, which follows `plan` if there is one."""
        self._began = self._now()
        if self._is_recorded(self._step):
            self._events = []
            self._collectives.clear()  # of the end of the step before
            number = None if plan is None else self._number(plan)
            self._note("iteration", step=self._step, planned=plan is not None, plan=number)
            for (id_, tier), chunk in self._chunks.items():
                self._introduce(chunk)
                self._note("resident", chunk=id_, tier=self._tiers[tier])
            self._note_memory()

    def ended_iteration(self, *, complete: bool) -> None:
        """It is over: by an optimizer step, or without one."""
        if self._events is not None:
            self._note_memory()
            while self._collectives:
                self._note("collective", **self._collectives.popleft())
            self._note("end", step=self._step, complete=complete)
            self._sink.events(self._events)
            self._events = None
        if complete:
            losses, self._losses = self._losses, []
            self._sink.step(
                {
                    "step": self._step,
                    "loss": sum(losses) / len(losses) if losses else None,
                    **self.details(),
                    "step_time_s": self._now() - self._began,
                    "peak_bytes": dict(zip(self._tiers, self._peak, strict=True)),
                    "moved_bytes": dict(self._moved),
                }
            )
            self._step += 1
            self._moved.clear()
            self._peak = list(self._totals)

    def began_segment(self, kind: str) -> None:
        """A forward, backward, step or evaluation begins."""
        self._segment = (kind, self._now())

    def ended_segment(self) -> None:
        """The segment that began last ends."""
        if self._segment is not None:
            kind, began = self._segment
            self._note("segment", kind=kind, begin=began, end=self._now())
            self._segment = None

    def updated(self, chunk: int, began: float, ended: float) -> None:
        """The weights in `chunk` were updated."""
        self._note("update", chunk=chunk, **self._span(began, ended))

    def loss(self, value: float) -> None:
        """The loss of a micro-batch."""
        self._losses.append(value)

    # From the memory manager

    def moment(self, uses: Sequence[Use]) -> None:
        if self._events is not None:
            self._note_memory()
            named = [[use.chunk, use.access.value, self._tiers[use.tier]] for use in uses]
            self._note("moment", uses=named)

    def placed(self, chunk: Chunk, tier: int) -> None:
        self._chunks[chunk.id, tier] = chunk
        self._add(tier, kind_of(chunk), chunk.nbytes)
        if self._events is not None:
            self._introduce(chunk)
            self._note("placed", chunk=chunk.id, tier=self._tiers[tier])

    def left(self, chunk: Chunk, tier: int, why: Why) -> None:
        self._chunks.pop((chunk.id, tier), None)
        self._add(tier, kind_of(chunk), -chunk.nbytes)
        self._note("left", chunk=chunk.id, tier=self._tiers[tier], why=why.value)

    def moved(self, chunk: Chunk, source: int, target: int, began: float, ended: float) -> None:
        way = f"{self._tiers[source]}->{self._tiers[target]}"
        self._moved[way] = self._moved.get(way, 0) + chunk.nbytes
        if self._events is not None:
            self._introduce(chunk)
            self._note(
                "transfer",
                chunk=chunk.id,
                source=self._tiers[source],
                target=self._tiers[target],
                bytes=chunk.nbytes,
                **self._span(began, ended),
            )

    def collective(self, name: str, chunk: str, nbytes: int, began: float, ended: float) -> None:
        """A collective ran; this comes from the thread that ran it (`CommObserver`)."""
        if self._events is not None:
            span = self._span(began, ended)
            self._collectives.append(
                {"name": name, "chunk": chunk[:_LONGEST], "bytes": nbytes, **span}
            )

    def mended(self, copies: Sequence[tuple[Chunk, int]]) -> None:
        here = {(chunk.id, tier): chunk for chunk, tier in copies}
        for (id_, tier), chunk in list(self._chunks.items()):
            if (id_, tier) not in here:
                self.left(chunk, tier, Why.FAILED)
        for (id_, tier), chunk in here.items():
            if (id_, tier) not in self._chunks:
                self.placed(chunk, tier)

    def waited(self, began: float, ended: float) -> None:
        self._note("wait", **self._span(began, ended))

    def other(self, tier: int, nbytes: int) -> None:
        self._add(tier, "other", nbytes - self._bytes[tier].get("other", 0))

    # Inside

    def _now(self) -> float:
        return round(self._clock() - self._zero, 6)

    def _span(self, began: float, ended: float) -> dict[str, float]:
        return {"begin": round(began - self._zero, 6), "end": round(ended - self._zero, 6)}

    def _number(self, plan: Plan) -> int | None:
        """The number of `plan`; None for one beyond the first few."""
        for number, known in enumerate(self._plans):
            if known is plan:
                return number
        if len(self._plans) == _MOST_PLANS:
            return None
        self._plans.append(plan)
        self._sink.plan(plan)
        return len(self._plans) - 1

    def _note(self, what: str, **fields: Any) -> None:
        if self._events is not None:
            self._events.append({"event": what, "time": self._now(), **fields})

    def _introduce(self, chunk: Chunk) -> None:
        if chunk.id not in self._known:
            self._known.add(chunk.id)
            self._note("chunk", chunk=chunk.id, kind=kind_of(chunk), bytes=chunk.nbytes)

    def _add(self, tier: int, kind: str, nbytes: int) -> None:
        by_kind = self._bytes[tier]
        by_kind[kind] = by_kind.get(kind, 0) + nbytes
        total = self._totals[tier] = self._totals[tier] + nbytes
        self._peak[tier] = max(self._peak[tier], total)
        if self._events is not None and total > self._largest_total[tier]:
            self._largest[tier], self._largest_total[tier] = dict(by_kind), total

    def _note_memory(self) -> None:
        """The largest use of each tier since the last time, and start anew from what is now."""
        for tier, name in enumerate(self._tiers):
            if self._largest_total[tier] < self._totals[tier]:
                self._largest[tier] = dict(self._bytes[tier])
            used = {kind: n for kind, n in self._largest[tier].items() if n}
            self._note("memory", tier=name, bytes=used)
            self._largest[tier] = dict(self._bytes[tier])
            self._largest_total[tier] = self._totals[tier]


def _some() -> Callable[[int], bool]:
    """The first steps, and of a long run some later ones."""

    def chosen(step: int) -> bool:
        return step <= FIRST or (step % EVERY == 0 and step // EVERY <= MOST - FIRST)

    return chosen
