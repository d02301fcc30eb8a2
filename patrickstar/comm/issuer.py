"""The same order of collectives on every rank, whatever path each rank takes through its model.

Ranks that branch differently ask for chunks in different orders, or not at all; issued as asked,
their collectives would never meet. An `OrderedIssuer` is given the order of a step (the same on
all ranks, checked at `begin`) and issues a collective only when its turn has come:

    issuer.begin(order)
    ticket = issuer.request(Collective.ALL_GATHER, "c3", lambda: chunks.all_gather("c3", full))
    ticket.wait()
    report = issuer.flush()

- A request that is early is buffered until everything before it has been issued.
- A `wait()` on a buffered ticket *closes* the places before it that this rank has not asked for:
  the rank takes part in them with nothing of its own (`absent`, given by the caller: zeros to a
  reduction, its shard to a gather). So a rank that skips a chunk can neither hang itself nor those
  that do not skip it.
- `flush()` closes all places that are left, then exchanges who was absent from what. So at the
  end of a step every rank has issued every place of the order exactly once, in order.

**Why a mismatch is never a hang.** Every rank issues the same sequence. A rank blocks only in a
wait for a place that is issued, and every other rank issues it at the latest in its `flush`; or in
the exchange of `flush`, which every rank reaches. A rank that reaches neither within the timeout
(dead, stuck, left with an exception) makes the others' waits end with an error that names it.

**Absence.** A place that no rank asked for is unused (`FlushReport.unused`): consistent, and known
so that an optimizer can treat its gradient as None. A reduction to which some ranks contributed
and some did not (`FlushReport.missing`) was completed with zeros from the latter; whether that is
what the run wants is its choice (`missing="zeros"` or `"raise"`). In the latter case the error is
raised on every rank, after all collectives have been issued, so the communicator stays usable.
A contribution that comes after its place was closed would be lost, so it is refused.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from patrickstar.comm.control import Control
from patrickstar.comm.errors import CommError, CommValueError
from patrickstar.comm.order import Collective, Slot, fingerprint, merge_orders
from patrickstar.comm.work import Work

Issue = Callable[[], Work]
"""Issues a collective, now."""


@dataclass(frozen=True)
class FlushReport:
    """Who was absent in a step, the same on every rank.

    Attributes:
        missing: the global ranks that did not ask for a reduction although others did, for each
            such place, in order.
        unused: the places that no rank asked for, in order.
    """

    missing: Mapping[Slot, tuple[int, ...]]
    unused: tuple[Slot, ...]


@dataclass
class _Place:
    """One place in the order of a step."""

    slot: Slot
    issue: Issue | None = None
    work: Work | None = None
    closed: bool = False


@dataclass
class _Step:
    """The state of one step; a new one for each `begin`."""

    places: list[_Place]
    turn: int = 0
    open: dict[Slot, deque[int]] = field(default_factory=lambda: defaultdict(deque))

    def __post_init__(self) -> None:
        for index, place in enumerate(self.places):
            self.open[place.slot].append(index)

    def take(self, slot: Slot) -> int | None:
        """Return the first place of `slot` that is neither asked for nor closed, once."""
        indices = self.open.get(slot)
        while indices:
            index = indices.popleft()
            if not self.places[index].closed:
                return index
        return None


class Ticket:
    """The handle of a request; the `Work` of its collective once that is issued."""

    def __init__(self, issuer: OrderedIssuer, step: _Step, index: int) -> None:
        self._issuer = issuer
        self._step = step
        self._index = index

    def wait(self, timeout: float | None = None) -> None:
        """Close the places before this one, and wait for the collective. See `Work.wait`."""
        self._issuer.close_before(self._step, self._index)
        work = self._step.places[self._index].work
        assert work is not None
        work.wait(timeout)

    def done(self) -> bool:
        """Whether the collective has been issued and has finished or failed."""
        work = self._step.places[self._index].work
        return work is not None and work.done()


class OrderedIssuer:
    """Issues collectives in an agreed order.

    Args:
        control: exchanges over all ranks that take part in the collectives.
        absent: takes part in a place for which this rank has nothing: for a reduction, contributes
            zeros; for a gather or broadcast, contributes this rank's part and receives the rest
            wherever it likes. Called when the place's turn has come.
        missing: what `flush` does about reductions that lacked a contribution of some ranks.
    """

    def __init__(
        self,
        control: Control,
        absent: Callable[[Slot], Work],
        missing: Literal["zeros", "raise"] = "zeros",
    ) -> None:
        if missing not in ("zeros", "raise"):
            raise CommValueError(f"missing={missing!r} is unknown; use 'zeros' or 'raise'")
        self._control = control
        self._absent = absent
        self._missing = missing
        self._lock = threading.RLock()  # autograd may run hooks on a thread of its own
        self._step: _Step | None = None

    def agree(self, observed: Sequence[Slot]) -> list[Slot]:
        """Merge what each rank observed in a step into one order; called on all ranks.

        Returns:
            The order of `merge_orders`, the same on every rank, for `begin`.

        Raises:
            CommError: a rank did not take part.
        """
        lines = "\n".join(f"{slot.collective}\t{slot.chunk}" for slot in observed)
        texts = self._control.exchange_bytes("agreement on an order", lines.encode())
        orders = []
        for text in texts:
            pairs = [line.split("\t", 1) for line in text.decode().splitlines()]
            orders.append([Slot(Collective(name), chunk) for name, chunk in pairs])
        return merge_orders(orders)

    def begin(self, order: Sequence[Slot]) -> None:
        """Start a step; called on all ranks with the same order.

        Raises:
            CommError: a rank did not take part, or has another order. Nothing was issued.
            CommValueError: the step before was not flushed.
        """
        with self._lock:
            if self._step is not None:
                raise CommValueError("the step before was not flushed; call flush() first")
            mine = torch.tensor([len(order), fingerprint(order)])
            orders = self._control.exchange("begin of a step", mine)
            differing = [
                rank
                for rank, row in zip(self._control.ranks, orders, strict=True)
                if not torch.equal(row, orders[0])
            ]
            if differing:
                lengths = dict(zip(self._control.ranks, orders[:, 0].tolist(), strict=True))
                raise CommError(
                    f"ranks {differing} have another order of collectives than rank "
                    f"{self._control.ranks[0]} (places per rank: {lengths}); agree() makes one",
                    ranks=differing,
                )
            self._step = _Step([_Place(Slot(*slot)) for slot in order])

    def request(self, collective: Collective, chunk: str, issue: Issue) -> Ticket:
        """Ask for the next place of `collective` on `chunk`.

        Args:
            collective: what `issue` issues.
            chunk: on which chunk.
            issue: called when its turn has come, on the thread that made it come. Buffers that it
                reads must stay as they are until then.

        Raises:
            CommError: the order has no such place left, or the place was closed before this rank
                asked (by a wait for a later one).
            CommValueError: no step has begun.
        """
        slot = Slot(collective, chunk)
        with self._lock:
            step = self._begun()
            index = step.take(slot)
            if index is not None:
                step.places[index].issue = issue
                self._advance(step)
                return Ticket(self, step, index)
            known = [place for place in step.places if place.slot == slot]
            if any(place.closed for place in known):
                raise CommError(
                    f"{slot} comes too late: a wait for a later place has already made this rank "
                    "take part in it with nothing of its own; ask for it before waiting, or put "
                    "it later in the order",
                    collective=collective,
                    chunk=chunk,
                )
            held = [str(place.slot.collective) for place in step.places if place.slot[1] == chunk]
            raise CommError(
                f"{slot} was asked for {len(known) + 1} times, the order of this step has it "
                f"{len(known)} times (of this chunk it has: {', '.join(held) or 'nothing'})",
                collective=collective,
                chunk=chunk,
            )

    def closed(self, collective: Collective, chunk: str) -> Work | None:
        """Return the work that `absent` returned for the last closed place of `collective` on
        `chunk`, or None when no such place was closed: for a gather whose result can still be
        used."""
        with self._lock:
            for place in reversed(self._begun().places):
                if place.slot == (collective, chunk) and place.closed:
                    return place.work
        return None

    def flush(self) -> FlushReport:
        """Issue all places that are left and find out who was absent; called on all ranks.

        Works are issued, not waited for.

        Raises:
            CommError: a rank did not come to its flush; or, with `missing="raise"`, a reduction
                lacked contributions (on every rank; the communicator stays usable).
            CommValueError: no step has begun.
        """
        with self._lock:
            step = self._begun()
            self.close_before(step, len(step.places))
            self._step = None
        asked = torch.tensor([not place.closed for place in step.places], dtype=torch.uint8)
        table = self._control.exchange("flush of a step", asked).bool()
        missing: dict[Slot, tuple[int, ...]] = {}
        unused = []
        for index, place in enumerate(step.places):
            column = table[:, index].tolist()
            if not any(column):
                unused.append(place.slot)
            elif not all(column) and place.slot.collective.contributes:
                lacking = {
                    rank
                    for rank, there in zip(self._control.ranks, column, strict=True)
                    if not there
                }
                missing[place.slot] = tuple(sorted(lacking | set(missing.get(place.slot, ()))))
        if missing and self._missing == "raise":
            listed = "; ".join(f"{slot}: ranks {list(ranks)}" for slot, ranks in missing.items())
            first = next(iter(missing))
            raise CommError(
                f"contributions are missing (zeros were used, do not use the results): {listed}",
                collective=first.collective,
                chunk=first.chunk,
                ranks=sorted({rank for ranks in missing.values() for rank in ranks}),
            )
        return FlushReport(missing, tuple(unused))

    def close_before(self, step: _Step, index: int) -> None:
        """Issue all places up to and with `index`; those not asked for with nothing of our own."""
        with self._lock:
            while step.turn <= index and step.turn < len(step.places):
                place = step.places[step.turn]
                if place.issue is None:
                    place.closed = True
                    place.work = self._absent(place.slot)
                    step.turn += 1
                self._advance(step)

    def _advance(self, step: _Step) -> None:
        """Issue what has its turn and was asked for."""
        while step.turn < len(step.places):
            place = step.places[step.turn]
            if place.issue is None:
                return
            place.work = place.issue()
            step.turn += 1

    def _begun(self) -> _Step:
        if self._step is None:
            raise CommValueError("no step has begun; call begin(order) first")
        return self._step
