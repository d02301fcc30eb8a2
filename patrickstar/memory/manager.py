"""The chunk memory manager: chunks over tiers, inside budgets.

    manager = ChunkManager([CpuTier("host", 64 << 20), DiskTier("disk", Spool("/scratch"))])
    chunk = manager.create(1_000_000, torch.float32)
    with manager.use([Use(chunk.id, Access.UPDATE)]):
        manager.tensor(chunk).add_(1)

The manager brings the parts together and owns none of their ideas: the ledger keeps the books, a
policy chooses who leaves, tiers hold bytes, transfer threads move them, a playback follows a plan.
All bookkeeping happens on the caller's thread.

Tier 0 is where computation happens. A chunk's buffer there never changes its address, so tensors
over it can be made once and kept. A chunk is evicted only when nobody but its permanent views
refers to its storage: the reference count of the storage is the truth about who might still read
it (autograd in the middle of an operator, a recomputed activation, a view in a local variable).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from patrickstar.errors import BudgetError, ChunkStateError
from patrickstar.memory.heap import ProcessHeap
from patrickstar.memory.ledger import CopyState, Ledger
from patrickstar.memory.planner import Action, make_plan
from patrickstar.memory.playback import Playback
from patrickstar.memory.policy import Candidate, FurthestNextUse, Policy
from patrickstar.memory.sizes import format_bytes
from patrickstar.memory.tiers import CpuTier, Tier, copy
from patrickstar.memory.trace import Recorder, Trace, Use
from patrickstar.memory.transfer import Completion, Transfer, TransferThreads

_PAGE = 4096


@dataclass(frozen=True)
class Chunk:
    """A contiguous block of `numel` elements of one dtype; the unit of residency.

    `kind` says what it holds ("parameter", "gradient", ...) in reports.
    """

    id: int
    numel: int
    dtype: torch.dtype
    kind: str

    @property
    def nbytes(self) -> int:
        """Bytes it takes on any tier: a whole number of pages."""
        return -(-self.numel * self.dtype.itemsize // _PAGE) * _PAGE


@dataclass(frozen=True)
class TierUsage:
    """Bytes in use now, at most since the last reset, and allowed (None: unlimited)."""

    in_use: int
    peak: int
    budget: int | None


@dataclass(frozen=True)
class MemoryReport:
    """`tiers` by name, and cumulative bytes `moved` by "from->to"."""

    tiers: dict[str, TierUsage]
    moved: dict[str, int]


class ChunkManager:
    """Keeps chunks on tiers inside the tiers' budgets.

    Args:
        tiers: from the fastest, where computation happens, to the slowest.
        policy: chooses who leaves when there is no plan, and makes the plans.
        plan: whether repeated iterations are planned; without it the policy decides alone.
        prefetch: whether plans load chunks ahead of their use.
        threads: how many copies run at once.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        policy: Policy | None = None,
        plan: bool = True,
        prefetch: bool = True,
        threads: int = 2,
    ) -> None:
        self.tiers = list(tiers)
        self.ledger = Ledger([(tier.name, tier.capacity) for tier in tiers])
        self.policy: Policy = policy or FurthestNextUse()
        self.plans: dict[Hashable, Playback] = {}
        self._plan, self._prefetch = plan, prefetch
        self._threads = TransferThreads(threads)
        budgets = [tier.capacity for tier in tiers if isinstance(tier, CpuTier)]
        self._cpu_budget = sum(budget or 0 for budget in budgets)
        self._heap = None if None in budgets else ProcessHeap()
        self._in_flight = 0
        self._process, self._closed = os.getpid(), False
        self._failure: Exception | None = None  # of a transfer that nobody waited for
        self._chunks: dict[int, Chunk] = {}
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}
        self._references: dict[int, int] = {}  # of the storage on tier 0, by permanent views
        self._views: dict[int, weakref.finalize[Any, Any]] = {}
        self._storages: set[int] = set()
        self._chunk_of_storage: dict[int, int] = {}
        self._next_id = 0
        self._moved: dict[tuple[int, int], int] = {}
        self._current: tuple[Use, ...] = ()
        self._kept: frozenset[tuple[int, int]] = frozenset()  # what the last access promised
        self._recorder: Recorder | None = None
        self._playback: Playback | None = None
        self._last: Playback | None = None
        self._key: Hashable = None
        self.abandoned: Trace | None = None
        # Copies that are to come and to go, by chunk and tier, in the order this was decided.
        self._loads: dict[tuple[int, int], None] = {}
        self._dying: dict[int, None] = {}  # released, but something still refers to them
        self._leaving: dict[tuple[int, int], None] = {}

    # Chunks

    def create(self, numel: int, dtype: torch.dtype, kind: str = "data") -> Chunk:
        """A new chunk. It takes no memory until its first use, when it is full of zeros."""
        chunk = Chunk(self._next_id, numel, dtype, kind)
        self._next_id += 1
        self.ledger.add(chunk.id, chunk.nbytes)
        self._chunks[chunk.id] = chunk
        return chunk

    def delete(self, chunk: Chunk) -> None:
        """Give up a chunk and its contents for good.

        Raises:
            ChunkStateError: it is in use, or a tensor that is no permanent view refers to it.
        """
        if self.is_referenced(chunk):
            raise ChunkStateError(
                f"a tensor still refers to chunk {chunk.id}; drop it before deleting the chunk"
            )
        self.release(chunk)
        self.ledger.remove(chunk.id)
        for tier in range(len(self.tiers)):
            tensor = self._tensors.pop((chunk.id, tier), None)
            if tensor is not None:
                storage = tensor.untyped_storage()._cdata
                self._storages.discard(storage)
                self._chunk_of_storage.pop(storage, None)
            self.tiers[tier].forget(chunk.id)
        self._references.pop(chunk.id, None)
        self._dying.pop(chunk.id, None)
        del self._chunks[chunk.id]

    def release(self, chunk: Chunk) -> None:
        """The contents of `chunk` are not needed any more; at its next use it is zeros again.

        A tensor that still refers to it goes on seeing what was there until then, and keeps the
        chunk's memory as long as it lives.
        """
        self._settle(chunk.id)
        in_use = any(self.ledger.entry(chunk.id).pins)
        if not in_use and self.ledger.is_valid(chunk.id, 0) and self.is_referenced(chunk):
            self._give_back(chunk.id, self.ledger.wrote(chunk.id, 0))
            self._dying[chunk.id] = None
        else:
            self._dying.pop(chunk.id, None)
            self._give_back(chunk.id, self.ledger.blank(chunk.id))
        if self._recorder is not None:
            self._recorder.blanked(chunk.id)

    def chunk(self, chunk: int) -> Chunk:
        return self._chunks[chunk]

    def tensor(self, chunk: Chunk, tier: int = 0) -> torch.Tensor:
        """The flat tensor over `chunk` on a memory tier; valid to touch while the chunk is used."""
        found = self._tensors.get((chunk.id, tier))
        if found is None:
            home = self.tiers[tier]
            assert isinstance(home, CpuTier), "only memory tiers have tensors"
            buffer = home.buffer(chunk.id, chunk.nbytes)
            # Known before a tensor is made over it: whoever watches operators must not count it.
            storage = buffer.storage
            self._storages.add(storage._cdata)
            found = buffer.tensor(chunk.dtype, chunk.numel)
            self._tensors[chunk.id, tier] = found
            if tier == 0:
                self._chunk_of_storage[storage._cdata] = chunk.id
                self._references[chunk.id] = _use_count(storage)
        return found

    def chunk_of(self, storage: int) -> int | None:
        """The chunk whose tier-0 storage has this C++ address, if any."""
        return self._chunk_of_storage.get(storage)

    def owns(self, storage: int) -> bool:
        """Whether the storage with this C++ address belongs to a chunk on any tier."""
        return storage in self._storages

    def keep_view(self, chunk: Chunk, view: torch.Tensor) -> None:
        """`view` lies in `tensor(chunk)` for good, or until it moves to another chunk.

        It does not keep the chunk resident, as another reference to the storage would.
        """
        self.tensor(chunk)  # so that its references are counted before the view is
        left = self._views.pop(id(view), None)
        if left is not None:
            left()
        self._references[chunk.id] += 1
        end = weakref.finalize(view, self._view_died, id(view), chunk.id)
        end.atexit = False
        self._views[id(view)] = end

    def is_referenced(self, chunk: Chunk) -> bool:
        """Whether anything but permanent views refers to the chunk's tier-0 storage."""
        tensor = self._tensors.get((chunk.id, 0))
        return tensor is not None and (
            _use_count(tensor.untyped_storage()) > self._references[chunk.id]
        )

    # Use

    @contextmanager
    def use(self, uses: Sequence[Use]) -> Iterator[None]:
        """Have chunks on their tiers, and keep them there for the duration.

        Raises:
            BudgetError: they do not fit together with what cannot leave. No contents are lost.
        """
        pinned = self._acquire(tuple(uses))
        try:
            yield
        finally:
            self._unpin(pinned)
            self._kept = frozenset()

    def access(self, uses: Sequence[Use]) -> None:
        """Have chunks on their tiers now, to read them; they stay at least until the next access.

        Whoever keeps a view of them keeps them there longer. To write, `use` them.
        """
        now = tuple(uses)
        assert not any(use.access.writes for use in now), "a chunk is written inside `use`"
        self._unpin(self._acquire(now))

    def prefetch(self, chunk: Chunk, tier: int = 0) -> None:
        """Begin to bring a chunk to `tier` as soon as there is room; does not wait."""
        self._loads[chunk.id, tier] = None
        self._pump()

    def evict(self, chunk: Chunk, tier: int = 0) -> None:
        """Make a chunk leave `tier` for the tier below; waits until it is there.

        Raises:
            ChunkStateError: it is in use there, or something still refers to its storage.
        """
        if self.ledger.state(chunk.id, tier) is CopyState.LOADING:
            self._settle(chunk.id)
        self._bury()
        if self.ledger.is_valid(chunk.id, tier):
            if self._is_in_use(chunk.id, tier):
                raise ChunkStateError(
                    f"chunk {chunk.id} is in use on {self.tiers[tier].name}, or a tensor that is "
                    "no permanent view still refers to its storage; it cannot be evicted"
                )
            self._evict(chunk.id, tier)

    def set_other(self, tier: int, nbytes: int) -> None:
        """Memory of `tier` that no chunk owns is `nbytes` now; chunks leave if need be."""
        # What is there already stays on the books while room is made: it is there.
        grown = nbytes - self.ledger.tiers[tier].other
        if grown > 0:
            self._make_room({tier: grown}, what="activations and other tensors need")
        self.ledger.set_other(tier, nbytes)
        self._settle_tier(tier)
        if self._recorder is not None:
            self._recorder.other(tier, nbytes)

    # Iterations

    def begin_iteration(self, key: Hashable) -> bool:
        """An iteration begins that is expected to repeat whenever `key` does.

        Returns whether it is planned; if not, the caller measures `set_other` while it runs.
        """
        self._key, self._recorder, self._current = key, None, ()
        playback = self.plans.get(key)
        if playback is not self._last:
            self._loads.clear()
            self._leaving.clear()
        self._playback = self._last = playback
        if self._playback is None:
            self._recorder = Recorder()
            return False
        self._playback.restart()
        return True

    def segment(self, name: Hashable) -> bool:
        """A part of the iteration begins. Returns whether the plan, if any, knows it."""
        if self._recorder is not None:
            self._recorder.segment(name)
        if self._playback is None:
            return False
        if self._playback.segment(name):
            return True
        self.plans.pop(self._key, None)
        self._playback = None
        return False

    def end_iteration(self) -> Trace | None:
        """The iteration is over; a first one of its kind is planned. Returns its trace, if new."""
        recorder, self._recorder, self._playback = self._recorder, None, None
        self._current = ()
        if recorder is None:
            return None
        sizes = {c.id: c.nbytes for c in self._chunks.values()}
        # Chunks that lived for one iteration will not be back, so neither will the iteration.
        lasting = all(use.chunk in sizes for m in recorder.trace.moments for use in m.uses)
        if self._plan and recorder.trace.moments and lasting:
            capacities = [tier.capacity for tier in self.tiers]
            plan = make_plan(
                recorder.trace, sizes, capacities, self.policy, prefetch=self._prefetch
            )
            if plan.fits(capacities[:-1]):
                self.plans[self._key] = Playback(plan)
        return recorder.trace

    def abandon_iteration(self) -> None:
        """The iteration ended early, by an exception for example; no plan is made of it.

        What had been recorded of it is left in `abandoned`.
        """
        if self._recorder is not None:
            self.abandoned = self._recorder.trace
        self._recorder = self._playback = None
        self._current = ()

    # Reporting

    def report(self) -> MemoryReport:
        names = [tier.name for tier in self.tiers]
        return MemoryReport(
            {a.name: TierUsage(a.in_use, a.peak, a.capacity) for a in self.ledger.tiers},
            {f"{names[s]}->{names[t]}": n for (s, t), n in sorted(self._moved.items())},
        )

    def close(self) -> None:
        """Stop the transfers and give the tiers back. Closing twice is harmless."""
        self._closed = True
        self._threads.close()
        for tier in self.tiers:
            tier.close()
        if self._heap is not None:
            self._heap.close()

    # Inside

    def _begin_moment(self, now: tuple[Use, ...]) -> None:
        if now == self._current:
            return
        self._current = now
        if self._recorder is not None:
            self._recorder.moment(now, self._held(now))
        if self._playback is not None:
            for action in self._playback.moment(now):
                self._schedule(action)
            for tier in range(max(len(self.tiers) - 1, 1)):
                other = self._playback.other(tier)
                if self.ledger.tiers[tier].other != other:
                    self._expect_other(tier, other)
        self._pump()

    def _held(self, now: tuple[Use, ...]) -> dict[int, tuple[int, ...]]:
        """The chunks on each tier that are not used now and could not leave either."""
        used = {(use.chunk, use.tier) for use in now}
        held: dict[int, tuple[int, ...]] = {}
        for tier in range(len(self.tiers)):
            stuck = (
                chunk
                for chunk in self._chunks
                if self.ledger.is_valid(chunk, tier)
                and (chunk, tier) not in used
                and self._is_in_use(chunk, tier)
            )
            if chunks := tuple(stuck):
                held[tier] = chunks
        return held

    def _expect_other(self, tier: int, nbytes: int) -> None:
        assert self._playback is not None
        try:
            self.set_other(tier, nbytes)
        except BudgetError:
            if not self._playback.strayed:
                raise
            # The largest of another path is a guess; what is there must do.
            account = self.ledger.tiers[tier]
            self.ledger.set_other(tier, max(0, int(min(nbytes, account.room + account.other))))
            self._settle_tier(tier)

    def _schedule(self, action: Action) -> None:
        key = (action.chunk, action.tier)
        if action.chunk not in self._chunks:
            return
        if action.kind == "load":
            self._leaving.pop(key, None)
            self._loads[key] = None
        elif action.kind == "evict":
            self._loads.pop(key, None)
            self._leaving[key] = None
        else:
            self._try_save(*key)

    def _pump(self, *, loads: bool = True) -> None:
        """Finish what is done and start what can be started, without waiting."""
        while self._in_flight and (completion := self._threads.poll()) is not None:
            self._finish(completion)
        self._bury()
        for key in list(self._leaving):
            self._try_leave(*key)
        while loads and self._loads:
            chunk, tier = next(iter(self._loads))
            if chunk in self._chunks and not self._try_load(chunk, tier):
                break
            del self._loads[chunk, tier]

    def _bury(self) -> bool:
        """Give up released contents that nothing refers to any more; whether there were any."""
        dead = [
            chunk
            for chunk in self._dying
            if not self._is_moving(chunk) and not self._is_in_use(chunk, 0)
        ]
        for chunk in dead:
            del self._dying[chunk]
            self._give_back(chunk, self.ledger.blank(chunk))
        return bool(dead)

    def _try_leave(self, chunk: int, tier: int) -> None:
        if chunk not in self._chunks or not self.ledger.is_valid(chunk, tier):
            del self._leaving[chunk, tier]
        elif (chunk, tier) not in self._kept and self._can_leave(chunk, tier):
            if self._is_saved(chunk, tier):
                del self._leaving[chunk, tier]
                self._drop(chunk, tier)
            elif self.ledger.state(chunk, tier + 1) is CopyState.ABSENT:
                self._try_save(chunk, tier)

    def _try_save(self, chunk: int, tier: int) -> None:
        if not self.ledger.is_valid(chunk, tier) or not self._can_leave(chunk, tier):
            return
        if self._is_saved(chunk, tier):
            return
        entry = self.ledger.entry(chunk)
        if entry.copies[tier + 1] is CopyState.ABSENT and self._fits(tier + 1, entry.nbytes):
            self._start(chunk, tier, tier + 1)

    def _try_load(self, chunk: int, tier: int) -> bool:
        """Whether there is nothing left to do for this load."""
        if self.ledger.state(chunk, tier) is not CopyState.ABSENT or self.ledger.is_blank(chunk):
            return True
        if self.ledger.is_being_written(chunk):
            return False
        source = self.ledger.source(chunk, tier)
        assert source is not None
        if source > tier + 1:
            if self.ledger.state(chunk, tier + 1) is CopyState.ABSENT:
                self._try_load(chunk, tier + 1)
            return False
        if not self._fits(tier, self._chunks[chunk].nbytes):
            return False
        self._start(chunk, source, tier)
        return True

    def _is_saved(self, chunk: int, tier: int) -> bool:
        """Whether a slower tier has the contents too; a plan counts on that, not on faster ones."""
        copies = self.ledger.entry(chunk).copies
        return tier + 1 == len(copies) or CopyState.VALID in copies[tier + 1 :]

    def _fits(self, tier: int, nbytes: int) -> bool:
        return nbytes <= self.ledger.tiers[tier].room

    def _can_leave(self, chunk: int, tier: int) -> bool:
        return not self.ledger.entry(chunk).locks[tier] and not self._is_in_use(chunk, tier)

    def _is_in_use(self, chunk: int, tier: int) -> bool:
        if self.ledger.entry(chunk).pins[tier]:
            return True
        return tier == 0 and self.is_referenced(self._chunks[chunk])

    def _acquire(self, uses: tuple[Use, ...]) -> tuple[Use, ...]:
        """Bring and pin chunks, all or none.

        Each is pinned as soon as it is there: while the next one is waited for, it must neither
        leave nor be saved. Old contents are given up last, when every chunk has its place.
        """
        self._refuse_when_over()
        self._kept = frozenset((use.chunk, use.tier) for use in uses)
        for key in self._kept:
            self._leaving.pop(key, None)
            self._loads.pop(key, None)
        pinned: list[Use] = []
        try:
            self._begin_moment(uses)
            for use in uses:
                if use.access.reads or self._has_valid(use):
                    self._ensure(use)
                    self._pin(use, pinned)
            self._renew([use for use in uses if use not in pinned], pinned)
        except BaseException:
            self._unpin(pinned)
            self._kept = frozenset()
            raise
        try:
            self._pump()  # there is no more room to be made for this access
        except Exception as error:  # of another chunk; old contents here are gone already
            self._failure = error
        return tuple(pinned)

    def _refuse_when_over(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self._closed:
            raise ChunkStateError("this ChunkManager is closed; its chunks cannot be used any more")
        if os.getpid() != self._process:
            raise ChunkStateError(
                "chunks belong to the process that made them, and this one was forked from it: it "
                "has neither their memory nor the threads that move them. Copy what a worker needs "
                "before the fork, or start workers with 'spawn'"
            )

    def _pin(self, use: Use, pinned: list[Use]) -> None:
        self.ledger.pin(use.chunk, use.tier, writes=use.access.writes)
        pinned.append(use)

    def _unpin(self, pinned: Sequence[Use]) -> None:
        for use in pinned:
            self.ledger.unpin(use.chunk, use.tier, writes=use.access.writes)

    def _has_valid(self, use: Use) -> bool:
        if self.ledger.state(use.chunk, use.tier) is CopyState.LOADING:
            self._settle(use.chunk)
        return self.ledger.is_valid(use.chunk, use.tier)

    def _ensure(self, use: Use) -> None:
        """Have valid contents on the tier; if they are to be written, nowhere else."""
        chunk, tier = use.chunk, use.tier
        if chunk in self._dying:  # used again before the last reference was gone
            del self._dying[chunk]
            self._settle(chunk)
            if self.ledger.is_valid(chunk, 0) and self._is_in_use(chunk, 0):
                self._give_back(chunk, self.ledger.wrote(chunk, 0))
                self.tensor(self._chunks[chunk]).data.zero_()  # what autograd saw is no contents
            else:
                self._give_back(chunk, self.ledger.blank(chunk))
        if self.ledger.is_blank(chunk):
            self._make_room({tier: self._chunks[chunk].nbytes})
            self._create([(chunk, tier)], zero=True)
        else:
            self._bring(chunk, tier)
        if use.access.writes:
            self._settle(chunk)
            self._give_back(chunk, self.ledger.wrote(chunk, tier))
        self.ledger.touch(chunk, tier)

    def _renew(self, uses: Sequence[Use], pinned: list[Use]) -> None:
        """Give chunks whose contents are replaced a place on tiers where they have none."""
        places = list({(use.chunk, use.tier): None for use in uses})
        need: dict[int, int] = {}
        for chunk, tier in places:
            if any(self.ledger.entry(chunk).pins):
                raise ChunkStateError(f"chunk {chunk} is in use; its contents cannot be given up")
            need[tier] = need.get(tier, 0) + self._chunks[chunk].nbytes
        while True:
            self._make_room(need)
            moving = [chunk for chunk, _ in places if self._is_moving(chunk)]
            if not moving:
                break
            self._settle(moving[0])
        self._create([p for p in places if not self.ledger.is_valid(*p)], zero=False)
        for chunk, tier in places:  # one of them may have come while another was waited for
            self._dying.pop(chunk, None)
            self._give_back(chunk, self.ledger.wrote(chunk, tier))
        for use in uses:
            self._pin(use, pinned)

    def _create(self, places: Sequence[tuple[int, int]], *, zero: bool) -> None:
        """Give chunks new contents on tiers with room for them, all or none."""
        taken: list[tuple[int, int]] = []
        try:
            for chunk, tier in places:
                self.tiers[tier].take(chunk, self._chunks[chunk].nbytes, zero=zero)
                taken.append((chunk, tier))
        except BaseException:
            for chunk, tier in taken:
                self.tiers[tier].give_back(chunk)
            raise
        for chunk, tier in places:
            self._give_back(chunk, self.ledger.blank(chunk))
            self.ledger.create(chunk, tier)
            self._settle_tier(tier)

    def _bring(self, chunk: int, tier: int) -> None:
        """Copy a chunk with contents to `tier`, one tier at a time.

        Whatever is waited for, others may move meanwhile, this chunk's other copies among them: so
        after each wait the next step is chosen anew.
        """
        while not self.ledger.is_valid(chunk, tier):
            source = self.ledger.source(chunk, tier)
            if self.ledger.state(chunk, tier) is CopyState.LOADING or source is None:
                self._wait_for_one()
            elif source > tier + 1:
                self._bring(chunk, tier + 1)
            elif not self._fits(tier, self._chunks[chunk].nbytes):
                self._free_some(tier, self._chunks[chunk].nbytes)
            else:
                self._start(chunk, source, tier)

    def _make_room(self, need: Mapping[int, int], what: str = "a chunk needs") -> None:
        """Evict until `need` bytes, by tier, fit; waits for transfers when nothing can leave."""
        while lacking := [tier for tier, nbytes in need.items() if not self._fits(tier, nbytes)]:
            self._free_some(lacking[0], need[lacking[0]], what)

    def _free_some(self, tier: int, nbytes: int, what: str = "a chunk needs") -> None:
        """One step towards `nbytes` of room on `tier`: a chunk leaves, or a transfer ends.

        Chunks that the plan lets leave go first, even if their saving has to be waited for: any
        other choice would move more.
        """
        if self._bury():
            return
        leaving = [
            chunk
            for chunk in self.ledger.evictable(tier)
            if (chunk, tier) not in self._kept and self._can_leave(chunk, tier)
        ]
        if tier + 1 == len(self.tiers):
            leaving = [chunk for chunk in leaving if not self.ledger.is_dirty(chunk, tier)]
        planned = [chunk for chunk in leaving if (chunk, tier) in self._leaving]
        if not planned and self._in_flight and self._is_leaving(tier):
            self._wait_for_one(loads=False)
        elif leaving:
            self._evict_one_of(planned or leaving, tier)
        elif self._in_flight:
            self._wait_for_one(loads=False)
        else:
            raise self._no_room(tier, nbytes, what)

    def _evict_one_of(self, chunks: Sequence[int], tier: int) -> None:
        """Evict the policy's choice, or another if the tier below has no room for that."""
        candidates = [self._candidate(chunk, tier) for chunk in chunks]
        while True:
            chosen = self.policy.choose(candidates)
            try:
                self._evict(chosen.chunk, tier)
                return
            except BudgetError:
                candidates = [c for c in candidates if not c.dirty or c.nbytes < chosen.nbytes]
                if not candidates:
                    raise

    def _is_leaving(self, tier: int) -> bool:
        """Whether a chunk that the plan lets leave `tier` is being saved."""
        return any(
            at == tier and chunk in self._chunks and self.ledger.entry(chunk).locks[tier]
            for chunk, at in self._leaving
        )

    def _no_room(self, tier: int, nbytes: int, what: str) -> BudgetError:
        account = self.ledger.tiers[tier]
        smallest = account.in_use + nbytes
        assert account.capacity is not None
        return BudgetError(
            f"the {account.name} budget of {format_bytes(account.capacity)} is too small: {what} "
            f"{format_bytes(nbytes)} while {format_bytes(account.in_use)} cannot leave. "
            f"The smallest budget that gets past this point is {format_bytes(smallest)} "
            f"({smallest} bytes)",
            tier=account.name,
            budget=account.capacity,
            smallest=smallest,
        )

    def _candidate(self, chunk: int, tier: int) -> Candidate:
        entry = self.ledger.entry(chunk)
        return Candidate(
            chunk,
            entry.nbytes,
            self.ledger.is_dirty(chunk, tier),
            entry.loaded_at[tier],
            entry.used_at[tier],
            *(self._playback.next_use(chunk, tier) if self._playback else ()),
        )

    def _evict(self, chunk: int, tier: int) -> None:
        """Make a chunk leave `tier`, saving it first if it is dirty; see `_bring` for the loop."""
        lower = tier + 1
        while self.ledger.is_valid(chunk, tier):
            planned = (chunk, tier) in self._leaving
            saved = (
                self._is_saved(chunk, tier) if planned else not self.ledger.is_dirty(chunk, tier)
            )
            if saved and not self.ledger.entry(chunk).locks[tier]:
                self._drop(chunk, tier)
            elif self.ledger.is_dirty(chunk, tier) and lower == len(self.tiers):
                raise self._no_room(tier, self._chunks[chunk].nbytes, "a chunk would have to leave")
            elif self._is_moving(chunk):
                self._wait_for_one(loads=False)
            elif not self._fits(lower, self._chunks[chunk].nbytes):
                self._free_some(lower, self._chunks[chunk].nbytes)
            else:
                self._start(chunk, tier, lower)

    def _drop(self, chunk: int, tier: int) -> None:
        self.ledger.drop(chunk, tier)
        self._give_back(chunk, [tier])

    def _give_back(self, chunk: int, tiers: Sequence[int]) -> None:
        for tier in tiers:
            self.tiers[tier].give_back(chunk)

    def _start(self, chunk: int, source: int, target: int) -> None:
        nbytes = self._chunks[chunk].nbytes
        self._refuse_when_over()
        from_, to = self.tiers[source], self.tiers[target]
        self.ledger.begin_load(chunk, source, target)
        try:
            to.take(chunk, nbytes, zero=False)
        except BaseException:
            self.ledger.fail_load(chunk, source, target)
            raise
        self._settle_tier(target)
        self._threads.start(Transfer(chunk, source, target), lambda: copy(chunk, nbytes, from_, to))
        self._in_flight += 1

    def _finish(self, completion: Completion) -> None:
        self._in_flight -= 1
        chunk, source, target = (
            completion.transfer.chunk,
            completion.transfer.source,
            completion.transfer.target,
        )
        if completion.error is not None:
            self.ledger.fail_load(chunk, source, target)
            self.tiers[target].give_back(chunk)
            raise completion.error
        self.ledger.finish_load(chunk, source, target)
        key = (source, target)
        self._moved[key] = self._moved.get(key, 0) + self._chunks[chunk].nbytes

    def _settle_tier(self, tier: int) -> None:
        account = self.ledger.tiers[tier]
        self.tiers[tier].settle(account.chunks, account.other)
        if self._heap is not None:
            self._heap.keep_within(self._cpu_budget)

    def _settle(self, chunk: int) -> None:
        """Wait until no transfer of `chunk` is under way."""
        while self._is_moving(chunk):
            self._wait_for_one()

    def _is_moving(self, chunk: int) -> bool:
        return CopyState.LOADING in self.ledger.entry(chunk).copies

    def _wait_for_one(self, *, loads: bool = True) -> None:
        """Wait until some transfer ends, and start what that makes possible."""
        if not self._in_flight:
            raise ChunkStateError("a transfer is waited for that was never started")
        self._finish(self._threads.wait())
        self._pump(loads=loads)

    def _view_died(self, view: int, chunk: int) -> None:
        self._views.pop(view, None)
        if chunk in self._references:
            self._references[chunk] -= 1


def _use_count(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))
