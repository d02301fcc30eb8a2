"""Which gaps to keep, so that the fewest bytes move.

A packing problem: every gap takes its bytes at every moment inside it, no moment has more than its
room, and what is not kept costs a load, a save, or both. For equal sizes and costs Belady's rule
solves it (L. A. Belady, IBM Systems Journal 5(2), 1966); with sizes, and with saves that several
gaps share, it is NP-hard. So it is solved nearly, and with proof of how nearly: `prices` give a
lower bound and an order to pack in, `exchange` improves the packing.

What fits a smaller capacity fits a larger one. Where the bound leaves open that a smaller capacity
was packed better by luck, it is packed too, and the better of the two is taken: more memory must
not move more bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from patrickstar.memory.exchange import Exchange
from patrickstar.memory.gaps import Gaps
from patrickstar.memory.packing import Floats, Packing
from patrickstar.memory.prices import Prices

_TURNS = 200  # of exchanges
_PHASES = 3  # of finding prices and packing by them
_LUCK = 0.005  # gains below this share are not looked for in smaller capacities
_RUNGS = 8  # smaller capacities that are tried at most
_STEPS = 64  # from a capacity down to the smallest, unless sizes suggest fewer


@dataclass
class Choice:
    """The gaps that are kept, the bytes that moves, and bytes that every choice moves.

    Bytes that move whatever is kept are in neither number.
    """

    kept: list[bool]
    moved: float
    bound: float


def choose_gaps(gaps: Gaps, capacity: int) -> Choice:
    """Choose what to keep on a tier of `capacity` bytes, which is at least `gaps.smallest`."""
    choice, price = _choose(gaps, capacity, 1.0)
    bound, smaller = choice.bound, capacity
    unit = max(1, gcd(*gaps.needed, *(gap.nbytes for gap in gaps.gaps)))
    step = max(unit, (capacity - gaps.smallest) // _STEPS // unit * unit)
    for _ in range(_RUNGS):
        smaller = (smaller - 1) // unit * unit + unit - step
        # Prices give a bound for every capacity.
        least = bound + (capacity - smaller) * price
        if smaller < gaps.smallest or least >= choice.moved * (1 - _LUCK):
            break
        other, _ = _choose(gaps, smaller, 0.25)
        if other.moved < choice.moved:
            choice = Choice(other.kept, other.moved, bound)
    return choice


def _choose(gaps: Gaps, capacity: int, share: float) -> tuple[Choice, float]:
    """A choice for this capacity alone, and how fast its bound rises as memory shrinks.

    Args:
        share: of the exchanges that may be tried.
    """
    room = capacity - np.array(gaps.needed, dtype=np.float64)
    packing = Packing(gaps, room)
    packing.change_to(np.ones(len(gaps.gaps), dtype=np.bool_))
    if not len(gaps.gaps) or packing.room.min() >= 0:
        return Choice([True] * len(gaps.gaps), 0.0, 0.0), 0.0
    packing.change_to(np.zeros(len(gaps.gaps), dtype=np.bool_))
    prices = Prices(packing)
    best = _Best(packing)
    worth = packing.worth()
    best.pack(worth / packing.sizes / (packing.last - packing.first))
    for _ in range(_PHASES):
        prices.improve(best.moved)
        best.pack((worth - prices.dues) / packing.sizes)
    best.take()
    exchange = Exchange(packing, prices.possible, prices.bound, share)
    exchange.start_over()
    exchange.run(int(share * _TURNS))
    # What saves nothing where it is may as well go.
    useful = packing.loss() > 0
    return Choice((packing.kept & useful).tolist(), packing.moved, prices.bound), prices.total


class _Best:
    """The best state that a packing was in."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self.kept, self.moved = packing.kept.copy(), packing.moved

    def pack(self, order: Floats) -> None:
        """Keep what fits, the highest first, and nothing else."""
        self._packing.change_to(np.zeros(len(self.kept), dtype=np.bool_))
        self._packing.fill(np.argsort(-order, kind="stable").tolist())
        self.note()

    def note(self) -> None:
        if self._packing.moved < self.moved:
            self.kept, self.moved = self._packing.kept.copy(), self._packing.moved

    def take(self) -> None:
        self._packing.change_to(self.kept)
        self._packing.moved = self.moved
