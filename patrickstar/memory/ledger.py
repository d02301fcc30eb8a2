"""The books of the chunk memory manager: who is where, and how much that is.

Pure bookkeeping with ids, bytes and states. It moves nothing and knows no tensor, so it can be
tested to the last transition. Every change of state goes through a method here that checks it
first: an illegal transition raises `ChunkStateError` and changes nothing, and a budget cannot be
broken because there is no way to write it down.

A chunk can have a *copy* on each tier (tiers are numbered from the fastest, 0, down):

    ABSENT --begin_load--> LOADING --finish_load--> VALID --drop--> ABSENT
       \\------------------create------------------> VALID

Copies that are VALID hold the same bytes. `wrote` makes one copy the only valid one; the others
are stale and become ABSENT. A chunk without any valid copy is *blank*: it has no contents worth
keeping (a gradient after the step, a moment before the first). A copy is *pinned* while somebody
uses it, and *locked* while a transfer reads from it; neither can be dropped. A pin that *writes*
excludes locks: what is being changed cannot be copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from patrickstar.errors import ChunkStateError


class CopyState(Enum):
    """The state of one chunk's copy on one tier."""

    ABSENT = "absent"
    LOADING = "loading"
    VALID = "valid"


@dataclass(slots=True)
class Entry:
    """What the ledger knows of one chunk; lists are indexed by tier.

    `version` grows whenever the contents change.
    """

    nbytes: int
    copies: list[CopyState]
    pins: list[int]
    writers: list[int]
    locks: list[int]
    loaded_at: list[int]
    used_at: list[int]
    version: int = 0


@dataclass
class TierAccount:
    """Bytes of one tier. `capacity` None means unlimited.

    `other` is memory of the tier that no chunk owns (activations, temporaries); the budget covers
    it together with the chunks.
    """

    name: str
    capacity: int | None
    chunks: int = 0
    other: int = 0
    peak: int = field(default=0)

    @property
    def in_use(self) -> int:
        return self.chunks + self.other

    @property
    def room(self) -> float:
        """Bytes that can still be taken; negative while `other` overruns the budget."""
        return float("inf") if self.capacity is None else self.capacity - self.in_use


class Ledger:
    """Chunks, their copies on `tiers`, and the bytes these take.

    Args:
        tiers: `(name, capacity in bytes or None)`, from the fastest to the slowest.
    """

    def __init__(self, tiers: Sequence[tuple[str, int | None]]) -> None:
        self.tiers = [TierAccount(name, capacity) for name, capacity in tiers]
        self._entries: dict[int, Entry] = {}
        # By tier, the chunks with a copy that is not ABSENT, the longest unused first.
        self._there: list[OrderedDict[int, None]] = [OrderedDict() for _ in tiers]
        self.clock = 0

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._entries

    def entry(self, chunk: int) -> Entry:
        """The entry of `chunk`; to be read, not to be changed."""
        return self._entries[chunk]

    def chunks(self) -> Iterator[int]:
        return iter(self._entries)

    def add(self, chunk: int, nbytes: int) -> None:
        """Enter a blank chunk of `nbytes` bytes."""
        if chunk in self._entries:
            raise ChunkStateError(f"chunk {chunk} is entered already")
        n = len(self.tiers)
        self._entries[chunk] = Entry(
            nbytes, [CopyState.ABSENT] * n, [0] * n, [0] * n, [0] * n, [0] * n, [0] * n
        )

    def remove(self, chunk: int) -> None:
        """Forget a blank chunk."""
        if any(state is not CopyState.ABSENT for state in self._entries[chunk].copies):
            raise ChunkStateError(f"chunk {chunk} still has a copy; release it first")
        del self._entries[chunk]

    def state(self, chunk: int, tier: int) -> CopyState:
        return self._entries[chunk].copies[tier]

    def is_valid(self, chunk: int, tier: int) -> bool:
        return self._entries[chunk].copies[tier] is CopyState.VALID

    def is_blank(self, chunk: int) -> bool:
        return CopyState.VALID not in self._entries[chunk].copies

    def is_dirty(self, chunk: int, tier: int) -> bool:
        """Whether `tier` holds the only valid copy, so that dropping it would lose the contents."""
        copies = self._entries[chunk].copies
        return copies[tier] is CopyState.VALID and copies.count(CopyState.VALID) == 1

    def source(self, chunk: int, target: int) -> int | None:
        """The tier to copy `chunk` from when `target` wants it: the nearest valid one."""
        copies = self._entries[chunk].copies
        valid = [tier for tier, state in enumerate(copies) if state is CopyState.VALID]
        return min(valid, key=lambda tier: abs(tier - target), default=None)

    def valid(self, tier: int) -> Iterator[int]:
        """Chunks whose copy on `tier` is valid, the longest unused first."""
        for chunk in self._there[tier]:
            if self._entries[chunk].copies[tier] is CopyState.VALID:
                yield chunk

    def create(self, chunk: int, tier: int) -> None:
        """Give a blank chunk a copy with new contents on `tier`."""
        entry = self._entries[chunk]
        if any(state is not CopyState.ABSENT for state in entry.copies):
            raise ChunkStateError(f"chunk {chunk} has contents already; it cannot be created anew")
        self._take(entry, chunk, tier)
        entry.copies[tier] = CopyState.VALID
        entry.version += 1
        self._touch(chunk, tier, loaded=True)

    def begin_load(self, chunk: int, source: int, target: int) -> None:
        """Start copying from `source` to `target`; the bytes on `target` are taken at once."""
        entry = self._entries[chunk]
        if entry.copies[source] is not CopyState.VALID:
            raise ChunkStateError(
                f"chunk {chunk} is {entry.copies[source].value} on {self.tiers[source].name}; "
                "only a valid copy can be read"
            )
        if entry.writers[source]:
            raise ChunkStateError(
                f"chunk {chunk} is being written on {self.tiers[source].name}; "
                "it can be copied when that is over"
            )
        if entry.copies[target] is not CopyState.ABSENT:
            raise ChunkStateError(
                f"chunk {chunk} is {entry.copies[target].value} on "
                f"{self.tiers[target].name} already"
            )
        self._take(entry, chunk, target)
        entry.copies[target] = CopyState.LOADING
        entry.locks[source] += 1
        self._touch(chunk, target, loaded=True)

    def finish_load(self, chunk: int, source: int, target: int) -> None:
        """The copy started by `begin_load` is complete."""
        self._end_load(chunk, source, target, CopyState.VALID)

    def fail_load(self, chunk: int, source: int, target: int) -> None:
        """The copy started by `begin_load` failed; the bytes on `target` are given back."""
        self._end_load(chunk, source, target, CopyState.ABSENT)
        self.tiers[target].chunks -= self._entries[chunk].nbytes

    def drop(self, chunk: int, tier: int) -> None:
        """Give up a copy that another valid copy makes superfluous."""
        if self.is_dirty(chunk, tier):
            raise ChunkStateError(
                f"the copy of chunk {chunk} on {self.tiers[tier].name} is the only one; "
                "save it to a lower tier first, or release the chunk"
            )
        self._remove_copy(chunk, tier)

    def wrote(self, chunk: int, tier: int) -> list[int]:
        """The copy on `tier` has new contents. Returns the tiers whose copies became stale."""
        entry = self._entries[chunk]
        if entry.copies[tier] is not CopyState.VALID:
            raise ChunkStateError(
                f"chunk {chunk} is {entry.copies[tier].value} on {self.tiers[tier].name}; "
                "it cannot be written there"
            )
        if entry.locks[tier] or CopyState.LOADING in entry.copies:
            raise ChunkStateError(f"chunk {chunk} is being copied; wait before writing to it")
        stale = [
            other
            for other, state in enumerate(entry.copies)
            if other != tier and state is CopyState.VALID
        ]
        for other in stale:
            if entry.pins[other]:
                raise ChunkStateError(
                    f"chunk {chunk} is in use on {self.tiers[other].name} while it is written "
                    f"on {self.tiers[tier].name}"
                )
        for other in stale:
            self._remove_copy(chunk, other)
        entry.version += 1
        return stale

    def blank(self, chunk: int) -> list[int]:
        """The contents of `chunk` are dead. Returns the tiers that held a copy."""
        entry = self._entries[chunk]
        if any(entry.pins) or any(entry.locks) or CopyState.LOADING in entry.copies:
            raise ChunkStateError(f"chunk {chunk} is in use; its contents cannot be given up")
        held = [tier for tier, state in enumerate(entry.copies) if state is CopyState.VALID]
        for tier in held:
            self._remove_copy(chunk, tier)
        return held

    def is_being_written(self, chunk: int) -> bool:
        return any(self._entries[chunk].writers)

    def pin(self, chunk: int, tier: int, *, writes: bool = False) -> None:
        """Keep the valid copy on `tier` where it is until `unpin`; pins are counted.

        While a pin `writes`, the copy cannot be copied elsewhere either.
        """
        entry = self._entries[chunk]
        if entry.copies[tier] is not CopyState.VALID:
            raise ChunkStateError(
                f"chunk {chunk} is {entry.copies[tier].value} on {self.tiers[tier].name}; "
                "only a valid copy can be pinned"
            )
        if writes and entry.locks[tier]:
            raise ChunkStateError(f"chunk {chunk} is being copied; wait before writing to it")
        entry.pins[tier] += 1
        entry.writers[tier] += int(writes)
        self._touch(chunk, tier)

    def unpin(self, chunk: int, tier: int, *, writes: bool = False) -> None:
        entry = self._entries[chunk]
        if (entry.writers[tier] if writes else entry.pins[tier] - entry.writers[tier]) <= 0:
            how = "for writing" if writes else "for reading"
            raise ChunkStateError(f"chunk {chunk} is not pinned {how} on {self.tiers[tier].name}")
        entry.pins[tier] -= 1
        entry.writers[tier] -= int(writes)

    def touch(self, chunk: int, tier: int) -> None:
        """Note a use, for the policies that go by recency."""
        self._touch(chunk, tier)

    def set_other(self, tier: int, nbytes: int) -> None:
        """Note how much of `tier` is used by what no chunk owns."""
        account = self.tiers[tier]
        account.other = nbytes
        account.peak = max(account.peak, account.in_use)

    def reset_peak(self) -> None:
        for account in self.tiers:
            account.peak = account.in_use

    def mend(self, pins: Sequence[tuple[int, int, bool]]) -> None:
        """Make the books right after a change that ended early, from the valid copies.

        Args:
            pins: the chunk, the tier and whether it writes, of every pin there is.
        """
        for account in self.tiers:
            account.chunks = 0
        for entry in self._entries.values():
            for tier, state in enumerate(entry.copies):
                entry.pins[tier] = entry.writers[tier] = entry.locks[tier] = 0
                if state is CopyState.VALID:
                    self.tiers[tier].chunks += entry.nbytes
                else:
                    entry.copies[tier] = CopyState.ABSENT
        for tier, there in enumerate(self._there):
            valid = [c for c, e in self._entries.items() if e.copies[tier] is CopyState.VALID]
            there.clear()
            there.update(dict.fromkeys(sorted(valid, key=lambda c: self._entries[c].used_at[tier])))
        for chunk, tier, writes in pins:
            self._entries[chunk].pins[tier] += 1
            self._entries[chunk].writers[tier] += int(writes)

    def _touch(self, chunk: int, tier: int, *, loaded: bool = False) -> None:
        entry, there = self._entries[chunk], self._there[tier]
        self.clock += 1
        if loaded:
            there[chunk] = None
        if chunk in there:
            there.move_to_end(chunk)
        entry.used_at[tier] = self.clock
        if loaded:
            entry.loaded_at[tier] = self.clock

    def _take(self, entry: Entry, chunk: int, tier: int) -> None:
        account = self.tiers[tier]
        if entry.nbytes > account.room:
            raise ChunkStateError(
                f"chunk {chunk} ({entry.nbytes} bytes) does not fit {account.name}: "
                f"{account.in_use} of {account.capacity} bytes are in use; make room first"
            )
        account.chunks += entry.nbytes
        account.peak = max(account.peak, account.in_use)

    def _remove_copy(self, chunk: int, tier: int) -> None:
        entry = self._entries[chunk]
        if entry.copies[tier] is not CopyState.VALID or entry.pins[tier] or entry.locks[tier]:
            raise ChunkStateError(
                f"the copy of chunk {chunk} on {self.tiers[tier].name} is "
                f"{entry.copies[tier].value}, pinned {entry.pins[tier]} times and read by "
                f"{entry.locks[tier]} transfers; it cannot be given up"
            )
        entry.copies[tier] = CopyState.ABSENT
        del self._there[tier][chunk]
        self.tiers[tier].chunks -= entry.nbytes

    def _end_load(self, chunk: int, source: int, target: int, state: CopyState) -> None:
        entry = self._entries[chunk]
        if entry.copies[target] is not CopyState.LOADING or not entry.locks[source]:
            raise ChunkStateError(f"chunk {chunk} is not loading to {self.tiers[target].name}")
        entry.copies[target] = state
        if state is CopyState.ABSENT:
            del self._there[target][chunk]
        entry.locks[source] -= 1
