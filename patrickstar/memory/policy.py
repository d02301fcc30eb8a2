"""Which chunk leaves when room is needed.

A policy is a pure choice among candidates: no clock, no randomness, no state of its own, so a plan
made from a trace and the run that follows it decide alike. Writing one takes a class with one
method; `patrickstar.policy` in the config takes its name ("package.module:Class").

A policy with a second method, `keep`, plans whole iterations itself; for any other the planner
plays the iteration through and asks it at every moment. One with a method `rank` is asked once for
as many as have to leave, and need not look at every chunk, so that room for a large thing stays
cheap to make among many thousands of small ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from patrickstar.memory.gaps import Gaps
from patrickstar.memory.keeping import choose_gaps


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk that could leave a tier.

    Attributes:
        chunk: its id.
        nbytes: its size.
        dirty: leaving costs a write, since no lower tier has its contents.
        loaded_at: when it came to the tier; larger is later.
        used_at: when it was last used there; larger is later.
        next_use: moments until its next use; None when it is not known or never comes.
        reloads: coming back costs a read; False when its next use overwrites it.
    """

    chunk: int
    nbytes: int
    dirty: bool
    loaded_at: int
    used_at: int
    next_use: int | None = None
    reloads: bool = True


class Policy(Protocol):
    """Chooses which candidate leaves. `candidates` is never empty."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate: ...


@runtime_checkable
class RankingPolicy(Protocol):
    """A policy that can say in which order chunks leave."""

    def rank(self, candidates: Iterable[Candidate]) -> Iterable[Candidate]:
        """The candidates in the order in which `choose` would choose one after the other.

        Args:
            candidates: the longest unused first; each that is looked at costs time, and no more
                are asked for than have to leave.
        """
        ...


@runtime_checkable
class WholeIterationPolicy(Protocol):
    """A policy that also chooses for a whole iteration that is known in advance."""

    def keep(self, gaps: Gaps, capacity: int) -> list[bool]:
        """Whether the tier of `capacity` bytes keeps the chunk of each of `gaps.gaps`.

        Together with `gaps.needed`, what is kept must fit at every moment.
        """
        ...


class Fifo:
    """First in, first out."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda c: c.loaded_at)

    def rank(self, candidates: Iterable[Candidate]) -> Iterable[Candidate]:
        return sorted(candidates, key=lambda c: c.loaded_at)


class Lru:
    """Least recently used."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda c: c.used_at)

    def rank(self, candidates: Iterable[Candidate]) -> Iterable[Candidate]:
        return candidates


class FurthestNextUse:
    """The fewest bytes, as far as the future is known.

    For an iteration that is known, see `keeping`. Moment by moment the chunk leaves whose absence
    is cheapest for the time it is away (Belady, with costs): leaving may cost a write and coming
    back a read, so a candidate is worth the moments it frees its bytes for, divided by the bytes
    that moves. One that moves nothing goes first. Without a known future this is `Lru`.
    """

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return max(candidates, key=self._worth)

    def rank(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        known = []
        for candidate in candidates:
            if candidate.next_use is None:  # nothing is worth more
                yield candidate
            else:
                known.append(candidate)
        yield from sorted(known, key=self._worth, reverse=True)

    def keep(self, gaps: Gaps, capacity: int) -> list[bool]:
        return choose_gaps(gaps, capacity).kept

    @staticmethod
    def _worth(candidate: Candidate) -> tuple[float, float, int]:
        moves = int(candidate.dirty) + int(candidate.reloads and candidate.next_use is not None)
        away = float("inf") if candidate.next_use is None else float(candidate.next_use)
        return (away / moves if moves else float("inf"), away, -candidate.used_at)
