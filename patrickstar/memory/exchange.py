"""Exchanging what is kept for what is not, where that moves fewer bytes.

A packing made in one go has room in odd places. Each turn here forces something in that was left
out, lets go of what costs least for the room it gives back until everything fits again, keeps what
fits besides, and undoes the whole if more bytes move than before (large neighbourhood search; P.
Shaw, CP 1998). Choices are varied at random, from a fixed seed: the same trace gives the same plan.
"""

from __future__ import annotations

import numpy as np

from patrickstar.memory.packing import Bools, Floats, Packing
from patrickstar.memory.relief import Relief

_MOST_FORCED = 3
# Gaps and moments looked at in arrays, at most: bounds the time to some tenths of a second. A gap
# that is looked at by itself takes as long as so many in an array.
_WORK = 30_000_000
_BY_ITSELF = 300


class Exchange:
    """Improves `packing`, a feasible one.

    Args:
        possible: the gaps that fit at all.
        bound: bytes that no choice can better; the search ends when it is reached.
        share: of the time that a search may take.
    """

    def __init__(self, packing: Packing, possible: Bools, bound: float, share: float = 1.0) -> None:
        self._packing, self._possible, self._bound = packing, possible, bound
        self._work = share * _WORK
        self._random = np.random.default_rng(0)
        self._lengths = (packing.last - packing.first).astype(np.float64)
        self._density = packing.worth() / packing.sizes / self._lengths

    def run(self, turns: int) -> None:
        for _ in range(turns):
            if self._packing.moved - self._bound < 1 or self._work <= 0:
                return
            self._turn()

    def start_over(self) -> None:
        """Keep everything possible and let go of what must go: good where that is little."""
        before, count = self._packing.state(), len(self._possible)
        self._packing.change_to(self._possible)
        if self._fit(np.zeros(count, dtype=np.bool_), np.ones(count)):
            self._fill(self._density)
        if self._packing.room.min() < 0 or self._packing.moved > before.moved:
            self._packing.go_back(before)

    def _turn(self) -> None:
        packing = self._packing
        out = np.flatnonzero(~packing.kept & self._possible)
        if not len(out):
            return
        before = packing.state()
        forced = np.zeros(len(before.kept), dtype=np.bool_)
        for index in self._random.choice(out, size=1 + self._random.integers(_MOST_FORCED)):
            episode = packing.episode[index]
            forced[packing.members[episode] if episode >= 0 else index] = True
        forced &= self._possible
        packing.change_to(before.kept | forced)
        noise = self._random.uniform(0.7, 1.4, size=len(forced))
        fits = self._fit(forced, noise)
        if fits:
            self._fill(self._density * noise)
        changed = int((packing.kept != before.kept).sum())
        self._work -= _BY_ITSELF * changed
        if not fits or packing.moved > before.moved + 0.5:
            self._work -= _BY_ITSELF * changed
            packing.go_back(before)

    def _fit(self, forced: Bools, noise: Floats) -> bool:
        """Let go of gaps, but not of the forced ones, until nothing lacks room."""
        packing = self._packing
        relief = Relief(packing, packing.kept & ~forced, noise)
        with np.errstate(divide="ignore"):
            while self._work > 0:
                if not relief.is_needed():
                    return True
                self._work -= packing.length + len(packing.kept)
                if not relief.let_go_of_one():
                    return False
        return False

    def _fill(self, density: Floats) -> None:
        fit = np.flatnonzero(self._packing.which_fit())
        self._work -= _BY_ITSELF * len(fit)
        self._packing.fill(fit[np.argsort(-density[fit], kind="stable")].tolist())
