"""What a policy that chooses one chunk at a time keeps, found out by playing on paper.

At each moment that lacks room the policy is asked who leaves, knowing exactly what comes. Three
rounds are played, so that the second begins and ends as every later one would, and what leaves in
it is what the policy lets go. Should the end of a round not meet its beginning exactly, the policy
is asked once more where room lacks.
"""

from __future__ import annotations

from patrickstar.memory.gaps import Gaps
from patrickstar.memory.policy import Candidate, Policy

_ROUNDS = 3


def keep_by_policy(gaps: Gaps, capacity: int, policy: Policy) -> list[bool]:
    """Which gaps `policy` keeps on a tier of `capacity` bytes, at least `gaps.smallest`."""
    rehearsal = _Rehearsal(gaps, capacity, policy)
    rehearsal.play()
    return rehearsal.settle()


class _Rehearsal:
    def __init__(self, gaps: Gaps, capacity: int, policy: Policy) -> None:
        self.length, self.gaps = gaps.length, gaps.gaps
        self.needed, self.capacity, self.policy = gaps.needed, capacity, policy
        self.begin: list[list[int]] = [[] for _ in range(self.length)]
        for index, gap in enumerate(self.gaps):
            self.begin[gap.start].append(index)
        self.written: dict[int, list[int]] = {}
        for number, episode in enumerate(gaps.episodes):
            self.written.setdefault(episode.written, []).append(number)
        self.since: dict[int, int] = {}  # gaps under way, and when they began
        self.came: dict[int, int] = {}  # chunks here, and when they came
        self.saved: set[int] = set()  # episodes under way
        self.let_go: set[int] = set()

    def play(self) -> None:
        taken = 0
        for time in range(_ROUNDS * self.length):
            now = time % self.length
            for index in [i for i in self.since if self._end(i) <= time]:
                del self.since[index]
                taken -= self.gaps[index].nbytes
            while taken + self.needed[now] > self.capacity:
                index = self._ask(list(self.since), time)
                if self.length <= self.since[index] < 2 * self.length:
                    self.let_go.add(index)
                taken -= self.gaps[index].nbytes
                self._leave(index)
            self.saved.difference_update(self.written.get(now, ()))
            for index in self.begin[now]:
                self.since[index] = time
                self.came.setdefault(self.gaps[index].chunk, time)
                taken += self.gaps[index].nbytes

    def settle(self) -> list[bool]:
        """The gaps that are kept, fewer where they do not all fit."""
        taken = list(self.needed)
        kept = [index not in self.let_go for index in range(len(self.gaps))]
        inside = [
            [moment % self.length for moment in range(gap.start + 1, gap.end)] for gap in self.gaps
        ]
        for index, moments in enumerate(inside):
            for moment in moments if kept[index] else ():
                taken[moment] += self.gaps[index].nbytes
        for now in range(self.length):
            while taken[now] > self.capacity:
                here = [i for i in range(len(kept)) if kept[i] and now in inside[i]]
                for index in here:
                    start = self.gaps[index].start
                    self.since[index] = start if start < now else start - self.length
                index = self._ask(here, now)
                kept[index] = False
                for moment in inside[index]:
                    taken[moment] -= self.gaps[index].nbytes
        return kept

    def _end(self, index: int) -> int:
        gap = self.gaps[index]
        return self.since[index] + gap.end - gap.start

    def _leave(self, index: int) -> None:
        gap = self.gaps[index]
        del self.since[index]
        self.came.pop(gap.chunk, None)
        if gap.episode is not None:
            self.saved.add(gap.episode)

    def _ask(self, indices: list[int], time: int) -> int:
        candidates = {}
        for index in indices:
            gap, since = self.gaps[index], self.since[index]
            candidates[gap.chunk] = (
                Candidate(
                    gap.chunk,
                    gap.nbytes,
                    dirty=gap.episode is not None and gap.episode not in self.saved,
                    loaded_at=self.came.get(gap.chunk, since),
                    used_at=since,
                    next_use=self._end(index) - time,
                    reloads=gap.reads,
                ),
                index,
            )
        chosen = self.policy.choose([candidate for candidate, _ in candidates.values()])
        return candidates[chosen.chunk][1]
