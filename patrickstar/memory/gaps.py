"""What a planner can choose: the gaps between the uses of a chunk.

Seen from one tier, a chunk is used at some moments of an iteration, and between two uses there is a
*gap*. Keeping it through the gap takes room at every moment between; letting it leave may cost a
save first and a load afterwards. An iteration repeats, so the last use is followed by the first
one, a full circle on. A plan for a tier *is* the set of gaps it keeps: everything else follows.

A chunk that was written is *dirty* until it is saved or its contents die, and one save does for the
whole time: the gaps in between form an *episode*. If a slower tier needs the contents, the save has
to happen anyway and is no reason to keep anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from patrickstar.memory.trace import Moment, Use


@dataclass(slots=True)
class Episode:
    """A chunk is dirty from the moment `written` on; by `forced` it is saved in any case."""

    chunk: int
    nbytes: int
    written: int
    forced: int | None = None


@dataclass(slots=True)
class Gap:
    """A chunk is used at moment `start`, next at `end`, and not between.

    Contents that die at `end`, because another tier replaces them or nobody needs them any more,
    are a gap too.

    Attributes:
        end: may lie beyond the last moment, in the next iteration; then moments go round.
        reads: coming back costs a load; False when the next use replaces the contents.
        episode: leaving costs a save, once for all gaps of this episode; None when it costs none.
    """

    chunk: int
    nbytes: int
    start: int
    end: int
    reads: bool
    episode: int | None


@dataclass(slots=True)
class Load:
    """A chunk comes from below, from moment `start` on at the earliest, for its use at `end`."""

    chunk: int
    nbytes: int
    start: int
    end: int


@dataclass
class Gaps:
    """One tier's part in an iteration of `length` moments.

    Attributes:
        needed: bytes at each moment that are no choice: chunks in use and what no chunk owns.
        gaps: those with at least one moment between.
        episodes: those that gaps refer to by position, and those that are saved in any case.
        loads: what has to come whatever is kept.
    """

    length: int
    needed: list[int]
    gaps: list[Gap] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)

    @property
    def smallest(self) -> int:
        """The smallest capacity that holds every moment."""
        return max(self.needed, default=0)

    @property
    def most_read(self) -> int:
        """The most bytes that may have to come for one moment."""
        read = [0] * self.length
        for gap in self.gaps:
            read[gap.end % self.length] += gap.nbytes * gap.reads
        return max(read, default=0)

    @property
    def everything(self) -> int:
        """The capacity at which every gap could be kept."""
        change = [0] * (2 * self.length + 1)
        for gap in self.gaps:
            change[gap.start + 1] += gap.nbytes
            change[gap.end] -= gap.nbytes
        taken = list(accumulate(change))
        around = zip(self.needed, taken, taken[self.length :], strict=False)
        return max((sum(moment) for moment in around), default=0)


def find_gaps(
    tier: int,
    uses: Sequence[Sequence[Use]],
    moments: Sequence[Moment],
    sizes: Mapping[int, int],
) -> Gaps:
    """The gaps of `tier` when the moments have these `uses`, those of other tiers included."""
    found = Gaps(len(moments), [moment.other.get(tier, 0) for moment in moments])
    events: dict[int, dict[int, _Event]] = {}

    def event(chunk: int, moment: int) -> _Event:
        return events.setdefault(chunk, {}).setdefault(moment, _Event())

    for index, (now, moment) in enumerate(zip(uses, moments, strict=True)):
        for use in now:
            entry = event(use.chunk, index)
            if use.tier == tier:
                if not entry.used:
                    found.needed[index] += sizes[use.chunk]
                    entry.used, entry.reads = True, use.access.reads
                entry.writes |= use.access.writes
            else:
                entry.wanted_below |= use.tier > tier and use.access.reads
                if use.access.writes:
                    entry.written_below |= use.tier > tier
                    entry.written_above |= use.tier < tier
        for chunk in moment.held.get(tier, ()):
            entry = event(chunk, index)
            if not entry.used:
                found.needed[index] += sizes[chunk]
                entry.used = entry.reads = True
        for chunk in moment.blanked:
            if chunk in events:
                event(chunk, index).blanked = True
    for chunk, of_chunk in events.items():
        if any(entry.used for entry in of_chunk.values()):
            _Walk(chunk, sizes[chunk], found).go(of_chunk)
    return found


@dataclass(slots=True)
class _Event:
    """What one moment does to one chunk on the tier in question, in this order."""

    wanted_below: bool = False
    used: bool = False
    reads: bool = False
    writes: bool = False
    written_below: bool = False
    written_above: bool = False
    blanked: bool = False


class _Walk:
    """One chunk's way through two iterations; the first shows how the second begins."""

    def __init__(self, chunk: int, nbytes: int, found: Gaps) -> None:
        self.chunk, self.nbytes, self.found = chunk, nbytes, found
        self.here = False  # it can have been kept on this tier since its last use
        self.below = True  # its contents are on a slower tier unless they are here
        self.last = self.since = 0  # when it was last used here, and when it went below
        self.written: int | None = None  # the moment, in one iteration, of the last write here
        self.forced: dict[int, int] = {}
        self.gaps: list[tuple[Gap, int | None]] = []

    def go(self, events: Mapping[int, _Event]) -> None:
        length = self.found.length
        for start in (0, length):
            self.gaps = []
            loads: list[Load] = []
            for moment, event in events.items():
                self._pass(event, moment, moment + start, loads)
        self.found.loads += loads
        numbers: dict[int, int] = {}
        for written, forced in self.forced.items():
            numbers[written] = len(self.found.episodes)
            self.found.episodes.append(Episode(self.chunk, self.nbytes, written, forced))
        for gap, dirty_since in self.gaps:
            if gap.end - gap.start <= 1:
                continue
            if dirty_since is not None and dirty_since not in self.forced:
                if dirty_since not in numbers:
                    numbers[dirty_since] = len(self.found.episodes)
                    self.found.episodes.append(Episode(self.chunk, self.nbytes, dirty_since))
                gap.episode = numbers[dirty_since]
            self.found.gaps.append(gap)

    def _gap(self, end: int, *, reads: bool) -> None:
        # The iteration that counts is the second; a gap into it may begin in the first.
        shift = self.found.length if self.last >= self.found.length else 0
        gap = Gap(self.chunk, self.nbytes, self.last - shift, end - shift, reads, None)
        self.gaps.append((gap, self.written))

    def _pass(self, event: _Event, moment: int, time: int, loads: list[Load]) -> None:
        length = self.found.length
        if event.wanted_below and self.written is not None:
            written = self.written
            self.forced[written] = written + (moment - written) % length
            self.written, self.below = None, True
        if event.used:
            if self.here:
                self._gap(time, reads=event.reads)
            elif event.reads and self.below:
                loads.append(Load(self.chunk, self.nbytes, self.since - length, time - length))
            elif event.reads or event.writes:
                self.written = moment  # made here
            if event.writes:
                self.written, self.below = moment, False
            self.here, self.last = True, time
        if event.written_below or event.written_above or event.blanked:
            if self.here:  # until then it takes room, or leaves and costs what that costs
                self._gap(time + event.blanked, reads=False)
            self.here, self.written, self.since = False, None, time + 1
            self.below = event.written_below and not event.blanked
