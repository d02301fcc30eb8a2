"""Prices for room: what each moment's bytes are worth, and a lower bound of what any plan moves.

Each moment gets a price per byte. A gap would *pay* its bytes at the prices of the moments inside
it, and is worth keeping if that is less than what leaving would move. Whatever the prices, what all
gaps would pay or move at best, less the price of all the room there is, is a lower bound of the
bytes any choice moves (Lagrangian relaxation; M. L. Fisher, Management Science 27(1), 1981). A
subgradient method raises prices where more is worth keeping than fits and lowers them where room
is left, towards the highest bound (B. T. Polyak's step, USSR Comp. Math. 9(3), 1969).
"""

from __future__ import annotations

import numpy as np

from patrickstar.memory.packing import Bools, Floats, Packing

_ROUNDS = 150
_PATIENCE = 12  # rounds without a better bound before steps are halved
_SMALLEST_STEP = 1e-4


class Prices:
    """The best prices found for the room of `packing`, which is empty when this is made.

    Attributes:
        bound: bytes that every choice moves at least.
        dues: what each gap would pay.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing, self._room = packing, packing.room.copy()
        # A gap that does not fit even alone is left out in any case.
        self.possible = packing.which_fit()
        self._prices = np.zeros(packing.length)
        self._step = 1.0
        self.bound = 0.0
        self.dues = np.zeros(len(packing.kept))
        self.total = 0.0  # of all prices: what one more byte at all times would save

    def improve(self, moved: float, rounds: int = _ROUNDS) -> None:
        """Raise the bound, given that some choice moves no more than `moved`."""
        prices, idle = self._prices, 0
        for _ in range(rounds):
            dues = self._due(prices)
            keep, bound = self._respond(dues, prices)
            if bound > self.bound:
                self.bound, self._prices, self.dues, idle = bound, prices, dues, 0
                self.total = float(prices.sum())
            else:
                idle += 1
                if idle == _PATIENCE:
                    self._step, idle, prices = self._step / 2, 0, self._prices
                    continue
            slope = self._taken(keep) - self._room
            slope[(prices <= 0) & (slope < 0)] = 0.0
            steepness = float(slope @ slope)
            if steepness == 0.0 or self._step < _SMALLEST_STEP or moved - self.bound < 1:
                return
            prices = np.maximum(0.0, prices + self._step * (moved - bound) / steepness * slope)

    def _due(self, prices: Floats) -> Floats:
        packing = self._packing
        total = np.zeros(2 * packing.length + 1)
        np.cumsum(np.concatenate((prices, prices)), out=total[1:])
        return (total[packing.last] - total[packing.first]) * packing.sizes

    def _respond(self, dues: Floats, prices: Floats) -> tuple[Bools, float]:
        """What is worth keeping at these dues, and the bound that follows."""
        packing = self._packing
        dues = np.where(self.possible, dues, np.inf)
        keep = dues <= packing.loads
        costs = np.minimum(dues, packing.loads)
        total = float(costs.sum())
        dirty = packing.dirty
        if len(dirty):
            # An episode is kept whole, or it pays its save and for each gap the cheaper way; at
            # least one gap is let go then.
            episodes, number = packing.episode[dirty], len(packing.saves)
            whole = np.bincount(episodes, weights=dues[dirty], minlength=number)
            apart = np.bincount(episodes, weights=costs[dirty], minlength=number)
            margin = np.full(number, np.inf)
            np.minimum.at(margin, episodes, np.maximum(0.0, packing.loads - dues)[dirty])
            broken = packing.saves + apart + margin
            used = np.isfinite(margin)
            total += float((np.minimum(whole, broken) - apart)[used].sum())
            keep[dirty] |= (whole <= broken)[episodes]
        return keep, total - float(prices @ self._room)

    def _taken(self, keep: Bools) -> Floats:
        packing, length = self._packing, self._packing.length
        sizes = packing.sizes[keep]
        change = np.bincount(packing.first[keep], weights=sizes, minlength=2 * length + 1)
        change -= np.bincount(packing.last[keep], weights=sizes, minlength=2 * length + 1)
        taken = np.cumsum(change)
        return np.asarray(taken[:length] + taken[length:-1], dtype=np.float64)
