"""Which kept gap to let go of, for the room it gives back where room lacks.

Letting go costs what it moves and gives bytes where they lack; the cheapest for what it gives goes
first. Nothing else happens here, so room only grows: moments that do not lack it in the beginning
are not looked at again, nor are gaps that have no other.
"""

from __future__ import annotations

import numpy as np

from patrickstar.memory.packing import Bools, Floats, Packing


class Relief:
    """Lets go of gaps of `packing`, one by one.

    Args:
        able: the gaps that may go; they are kept.
        noise: factors of what letting go costs, by gap.
    """

    def __init__(self, packing: Packing, able: Bools, noise: Floats) -> None:
        self._packing = packing
        lacking = np.flatnonzero(packing.room < 0)
        # Places among the moments that lack, which go round like the moments.
        around = np.concatenate((lacking, lacking + packing.length))
        self._moments = np.concatenate((lacking, lacking))
        self._lack = -packing.room[self._moments]
        gaps = np.flatnonzero(able)
        first = np.searchsorted(around, packing.first[gaps])
        last = np.searchsorted(around, packing.last[gaps])
        some = last > first
        self._gaps, self._first, self._last = gaps[some], first[some], last[some]
        self._sizes = packing.sizes[self._gaps]
        self._noise = noise[self._gaps]
        # What letting go costs; infinite once a gap has gone.
        self._cost = self._noise * (packing.loss()[self._gaps] + 1.0)
        self._place = np.full(len(able), -1, dtype=np.int64)
        self._place[self._gaps] = np.arange(len(self._gaps))
        # Sums up to each place; bytes that a gap has at the moments that lack room.
        self._sums = np.zeros(len(around) + 1)
        self._lacking, self._most = -1, self._sizes
        self._given = np.empty_like(self._sizes)

    def is_needed(self) -> bool:
        """Whether any moment lacks room."""
        return bool(self._lack.any())

    def let_go_of_one(self) -> bool:
        """Let go of the gap whose going costs least for what it gives.

        Returns:
            False if none gives anything. What gives nothing has an infinite price, of which numpy
            may warn.
        """
        if not len(self._gaps):
            return False
        # What it has where room lacks, but no more than what lacks.
        lacking = int(np.count_nonzero(self._lack))
        if lacking != self._lacking:
            self._lacking = lacking
            self._most = self._sizes * self._inside(self._lack > 0)
        given = np.minimum(self._inside(self._lack), self._most, out=self._given)
        price = np.divide(self._cost, given, out=given)
        place = int(price.argmin())
        if price[place] == np.inf:
            return False
        self._let_go(place)
        return True

    def _inside(self, values: Floats | Bools) -> Floats:
        """The sum of `values` over the inside of each gap."""
        values.cumsum(out=self._sums[1:])
        return np.subtract(self._sums[self._last], self._sums[self._first], out=self._given)

    def _let_go(self, place: int) -> None:
        gap, packing = int(self._gaps[place]), self._packing
        packing.let_go(gap)
        self._cost[place] = np.inf
        np.maximum(-packing.room[self._moments], 0.0, out=self._lack)
        episode = packing.episode[gap]
        if episode >= 0 and packing.left[episode] == 1:  # it is saved now, whatever else goes
            for member in packing.members[episode]:
                other = self._place[member]
                if other >= 0 and packing.kept[member]:
                    self._cost[other] = self._noise[other] * (packing.loads[member] + 1.0)
