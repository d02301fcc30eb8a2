"""A set of kept gaps, the room it leaves, and the bytes that the others move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from patrickstar.memory.gaps import Gaps

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class State:
    """What a packing was like."""

    kept: Bools
    room: Floats
    left: Ints
    moved: float


class Packing:
    """Which of `gaps` are kept in `room` bytes at each moment.

    Attributes:
        kept: whether each gap is kept. `room` may be negative while gaps are exchanged.
        moved: bytes that those that are not kept move, episodes counted once.
        first, last: the moments of each gap's inside, from `first` up to but without `last`; a gap
            that goes round has `last` beyond the end of the iteration.
    """

    def __init__(self, gaps: Gaps, room: Floats) -> None:
        count = len(gaps.gaps)
        self.length = gaps.length
        self.room = room.copy()
        self.sizes = np.fromiter((gap.nbytes for gap in gaps.gaps), np.float64, count)
        self.first = np.fromiter((gap.start + 1 for gap in gaps.gaps), np.int64, count)
        self.last = np.fromiter((gap.end for gap in gaps.gaps), np.int64, count)
        self.loads = self.sizes * np.fromiter((gap.reads for gap in gaps.gaps), np.float64, count)
        self.episode = np.fromiter(
            (-1 if gap.episode is None else gap.episode for gap in gaps.gaps), np.int64, count
        )
        self.dirty = np.flatnonzero(self.episode >= 0)
        self.saves = np.fromiter((e.nbytes for e in gaps.episodes), np.float64, len(gaps.episodes))
        self.members: list[list[int]] = [[] for _ in gaps.episodes]
        for index in self.dirty:
            self.members[self.episode[index]].append(int(index))
        # Plain numbers and views: each gap is looked at by itself, again and again.
        self._inside = [
            self._views(a, b) for a, b in zip(self.first.tolist(), self.last.tolist(), strict=True)
        ]
        self._numbers: list[tuple[float, float, int]] = list(
            zip(self.sizes.tolist(), self.loads.tolist(), self.episode.tolist(), strict=True)
        )
        self.kept: Bools = np.zeros(count, dtype=np.bool_)
        self.left = np.array([len(members) for members in self.members], dtype=np.int64)
        self.moved = float(self.loads.sum() + self.saves[self.left > 0].sum())

    def _views(self, first: int, last: int) -> tuple[Floats, ...]:
        """The room inside a gap: one stretch of moments, or two when it goes round."""
        n = self.length
        if last <= n:
            return (self.room[first:last],)
        if first >= n:
            return (self.room[first - n : last - n],)
        return (self.room[first:n], self.room[: last - n])

    def fits(self, index: int) -> bool:
        size = self._numbers[index][0]
        return all(np.minimum.reduce(room) >= size for room in self._inside[index])

    def keep(self, index: int) -> None:
        self._change(index, -1)

    def let_go(self, index: int) -> None:
        self._change(index, 1)

    def _change(self, index: int, sign: int) -> None:
        size, loads, episode = self._numbers[index]
        change = sign * size
        for room in self._inside[index]:
            room += change
        self.kept[index] = sign < 0
        self.moved += sign * loads
        if episode >= 0:
            left = self.left.item(episode)
            self.left[episode] = left + sign
            if not left or not left + sign:  # its save comes or goes
                self.moved += sign * self.saves.item(episode)

    def state(self) -> State:
        """What is kept now, to go back to."""
        return State(self.kept.copy(), self.room.copy(), self.left.copy(), self.moved)

    def go_back(self, state: State) -> None:
        self.kept[:], self.room[:], self.left[:] = state.kept, state.room, state.left
        self.moved = state.moved

    def change_to(self, kept: Bools) -> None:
        for index in np.flatnonzero(kept != self.kept):
            self._change(int(index), -1 if kept[index] else 1)

    def fill(self, order: Iterable[int]) -> None:
        """Keep what fits, in this order."""
        for index in order:
            if not self.kept[index] and self.fits(index):
                self.keep(index)

    def which_fit(self) -> Bools:
        """The gaps that are not kept and would fit now, each by itself."""
        waiting = np.flatnonzero(~self.kept)
        least = _least(
            np.concatenate((self.room, self.room)), self.first[waiting], self.last[waiting]
        )
        fit = np.zeros(len(self.kept), dtype=np.bool_)
        fit[waiting] = least >= self.sizes[waiting]
        return fit

    def worth(self) -> Floats:
        """What each gap saves when it is kept, if its episode is kept whole, shared evenly."""
        worth = self.loads.copy()
        if len(self.dirty):
            episodes = self.episode[self.dirty]
            worth[self.dirty] += (self.saves / np.array([len(m) or 1 for m in self.members]))[
                episodes
            ]
        return worth

    def loss(self) -> Floats:
        """What each kept gap would move now if it were let go."""
        loss = self.loads.copy()
        if len(self.dirty):
            episodes = self.episode[self.dirty]
            loss[self.dirty] += np.where(self.left[episodes] == 0, self.saves[episodes], 0.0)
        return loss


def _least(values: Floats, first: Ints, last: Ints) -> Floats:
    """The least of `values[first:last]` for each pair, by a table of spans of doubling length."""
    table = [values]
    while 2 << (len(table) - 1) <= len(values):
        step, shorter = 1 << (len(table) - 1), table[-1]
        table.append(np.minimum(shorter[:-step], shorter[step:]))
    level = np.int64(np.frexp((last - first).astype(np.float64))[1]) - 1
    least = np.empty(len(first))
    for number, spans in enumerate(table):
        at = np.flatnonzero(level == number)
        if len(at):
            least[at] = np.minimum(spans[first[at]], spans[last[at] - (1 << number)])
    return least
