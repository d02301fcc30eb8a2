"""The chunk memory manager: chunks over tiers, inside budgets.

    manager = ChunkManager([CpuTier("host", 64 << 20), DiskTier("disk", Spool("/scratch"))])
    chunk = manager.create(1_000_000, torch.float32)
    with manager.use([Use(chunk.id, Access.UPDATE)]):
        manager.tensor(chunk).add_(1)

The manager brings the parts together and owns none of their ideas: the ledger keeps the books
(`ledger`), copies and transfers follow them (`residency`), a policy or a plan says what moves
(`mover`, `iterations`). What is here is a use from beginning to end: chunks are brought, all or
none, pinned while they are used, and free to go afterwards. All bookkeeping happens on the caller's
thread.

That thread can be interrupted between any two lines, and no line of the books is special enough to
hold signals back for. Instead every change is made in an order that loses nothing wherever it ends:
a copy counts as valid only after its bytes are there, and as gone before its place is taken away.
After an exception that is not one of ours the books are in doubt, and the next call makes them
right from what is known to be true: valid copies, leases that are alive, and idle threads.

Tier 0 is where computation happens. A chunk is evicted from it only when nobody but its permanent
views refers to its storage (`tensors`).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

import torch

from patrickstar.errors import BudgetError, ChunkStateError, PatrickStarError
from patrickstar.memory.chunk import Chunk, MemoryReport, TierUsage
from patrickstar.memory.due import Due, DueWork
from patrickstar.memory.iterations import Iterations
from patrickstar.memory.lease import Lease
from patrickstar.memory.ledger import CopyState
from patrickstar.memory.mover import Mover
from patrickstar.memory.observer import Observer, Why
from patrickstar.memory.planner import Plan
from patrickstar.memory.playback import Playback
from patrickstar.memory.policy import FurthestNextUse, Policy
from patrickstar.memory.residency import Residency
from patrickstar.memory.tiers import DiskTier, Tier
from patrickstar.memory.trace import Access, Trace, Use
from patrickstar.memory.transfer import AT_ONCE


class ChunkManager:
    """Keeps chunks on tiers inside the tiers' budgets.

    Args:
        tiers: from the fastest, where computation happens, to the slowest.
        policy: chooses who leaves when there is no plan, and makes the plans.
        plan: whether repeated iterations are planned; without it the policy decides alone.
        prefetch: whether plans load chunks ahead of their use.
        threads: how many copies run at once.
        observer: is told what happens, if there is one.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        policy: Policy | None = None,
        plan: bool = True,
        prefetch: bool = True,
        threads: int = AT_ONCE,
        observer: Observer | None = None,
    ) -> None:
        self.policy: Policy = policy or FurthestNextUse()
        self._residency = Residency(tiers, threads, observer)
        self._iterations = Iterations(self.policy, plan=plan, prefetch=prefetch)
        self._mover = Mover(self._residency, self.policy, self._iterations)
        self.tiers, self.ledger = self._residency.tiers, self._residency.ledger
        self._chunks, self._tensors = self._residency.chunks, self._residency.tensors
        self._due = DueWork()
        self._failure: Exception | None = None  # of a transfer that nobody waited for
        self._next_id = 0
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._in_doubt = False

    # Chunks

    def create(self, numel: int, dtype: torch.dtype, kind: str = "data") -> Chunk:
        """A new chunk. It takes no memory until its first use, when it is full of zeros."""
        self._next_id += 1
        chunk = Chunk(self._next_id - 1, numel, dtype, kind)
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
        try:
            self._residency.forget(chunk.id)
            self._mover.revive(chunk.id)
        except BaseException as error:
            self._doubt_unless_ours(error)
            raise

    def release(self, chunk: Chunk) -> None:
        """The contents of `chunk` are not needed any more; at its next use it is zeros again.

        A tensor that still refers to it goes on seeing what was there until then, and keeps the
        chunk's memory as long as it lives.
        """
        self._mend()
        try:
            self._release(chunk)
        except BaseException as error:
            self._doubt_unless_ours(error)
            raise

    def chunk(self, chunk: int) -> Chunk:
        return self._chunks[chunk]

    def tensor(self, chunk: Chunk, tier: int = 0) -> torch.Tensor:
        """The flat tensor over `chunk` on a memory tier; valid to touch while the chunk is used."""
        return self._tensors.get(chunk, tier)

    def chunk_of(self, storage: int) -> int | None:
        """The chunk whose tier-0 storage has this C++ address, if any."""
        return self._tensors.chunk_of(storage)

    def owns(self, storage: int) -> bool:
        """Whether the storage with this C++ address belongs to a chunk on any tier."""
        return self._tensors.owns(storage)

    def keep_view(self, chunk: Chunk, view: torch.Tensor) -> None:
        """`view` lies in `tensor(chunk)` for good, or until it moves to another chunk.

        It does not keep the chunk resident, as another reference to the storage would.
        """
        self._tensors.keep_view(chunk, view)

    def drop_view(self, view: torch.Tensor) -> None:
        """`view` was a permanent view and lies elsewhere now, outside any chunk."""
        self._tensors.drop_view(view)

    def permanent_views(self, chunk: Chunk) -> list[torch.Tensor]:
        """The permanent views of the chunk that are alive."""
        return self._tensors.views(chunk.id)

    def is_in_use(self, chunk: Chunk) -> bool:
        """Whether the chunk is in a `use` now, or something may read it past the manager."""
        return any(self._residency.is_in_use(chunk.id, tier) for tier in range(len(self.tiers)))

    def is_pinned(self, chunk: Chunk) -> bool:
        """Whether the chunk is in a `use` now."""
        return any(self.ledger.entry(chunk.id).pins)

    def version(self, chunk: Chunk) -> int:
        """A number that grows whenever the contents of `chunk` may have changed."""
        return self.ledger.entry(chunk.id).version

    def is_referenced(self, chunk: Chunk) -> bool:
        """Whether anything but permanent views refers to the chunk's tier-0 storage."""
        return self._tensors.is_referenced(chunk.id)

    # Use

    def use(self, uses: Sequence[Use]) -> Lease:
        """Have chunks on their tiers, and keep them there for the duration of a `with`.

        Raises:
            BudgetError: they do not fit together with what cannot leave. No contents are lost.
        """
        return Lease(tuple(uses), self._begin_use, self._end_use, self._doubt)

    def access(self, uses: Sequence[Use]) -> None:
        """Have chunks on their tiers now, to read them; they stay at least until the next access.

        Whoever keeps a view of them keeps them there longer. To write, `use` them.
        """
        now = tuple(uses)
        for use in now:
            assert use.access is Access.READ, "a chunk is written inside `use`"
        self._mend()
        try:
            pinned: list[Use] = []
            self._acquire(now, pinned)
            self._unpin(pinned)
        except BaseException as error:
            self._doubt_unless_ours(error)
            raise

    def before_next_use(self, due: Due) -> None:
        """Put off `due.work` until one of `due.chunks` is used, however that comes about.

        The chunks keep their contents until then, and whoever uses one of them finds the work done.
        If room cannot be made for it, that use fails and the work stays due.
        """
        self._due.add(due)

    def is_due(self, chunk: Chunk) -> bool:
        """Whether work on `chunk` has been put off."""
        return chunk.id in self._due

    def drop_due(self, chunk: Chunk) -> None:
        """What was put off until `chunk` is used will not be done."""
        self._due.drop(chunk.id)

    def has_due(self) -> bool:
        """Whether any work has been put off that does not wait for a use alone."""
        return bool(self._due.all())

    def do_due(self, chunks: Sequence[int] | None = None) -> None:
        """Do now what was put off, for these chunks or for all.

        Raises:
            BudgetError: there is no room for it; it stays due.
        """
        wanted = frozenset(chunks or ())
        for due in self._due.all() if chunks is None else self._due.of(chunks):
            self._do(due, wanted)

    def _do(self, due: Due, wanted: frozenset[int]) -> None:
        due.running = True
        try:
            if due.prepare is not None:
                due.prepare(wanted)
            with self.use(due.uses):
                due.work()
                self._due.remove(due)
            for chunk in due.dead:
                self.release(self._chunks[chunk])
        finally:
            due.running = False

    def prefetch(self, chunk: Chunk, tier: int = 0) -> None:
        """Begin to bring a chunk to `tier` as soon as there is room; does not wait."""
        self._mend()
        try:
            self._mover.expect(chunk.id, tier)
            self._mover.pump()
        except BaseException as error:
            self._doubt_unless_ours(error)
            raise

    def evict(self, chunk: Chunk, tier: int = 0) -> None:
        """Make a chunk leave `tier` for the tier below; waits until it is there.

        Raises:
            ChunkStateError: it is in use there, or something still refers to its storage.
        """
        self._mend()
        try:
            self._evict(chunk, tier)
        except BaseException as error:
            self._doubt_unless_ours(error)
            raise

    def set_other(self, tier: int, nbytes: int) -> None:
        """Memory of `tier` that no chunk owns is `nbytes` now; chunks leave if need be."""
        self._mend()
        try:
            self._set_other(tier, nbytes)
        except BaseException as error:
            self._doubt_unless_ours(error)
            raise

    def limit(self, tier: int, nbytes: int) -> None:
        """`tier` has room for `nbytes` bytes and no more from now on."""
        self.tiers[tier].capacity = self.ledger.tiers[tier].capacity = nbytes

    # Iterations

    def begin_iteration(self, key: Hashable) -> bool:
        """An iteration begins that is expected to repeat whenever `key` does.

        Returns whether it is planned; if not, the caller measures `set_other` while it runs.
        """
        if not self._iterations.begin(key):
            self._mover.forget_plan()
        return self._iterations.playback is not None

    def segment(self, name: Hashable) -> bool:
        """A part of the iteration begins. Returns whether the plan, if any, knows it."""
        return self._iterations.segment(name)

    def end_iteration(self) -> Trace | None:
        """The iteration is over; a first one of its kind is planned. Returns its trace, if new."""
        sizes = {chunk.id: chunk.nbytes for chunk in self._chunks.values()}
        return self._iterations.end(sizes, [tier.capacity for tier in self.tiers])

    def plan_iteration(self, key: Hashable, trace: Trace) -> bool:
        """Plan iterations of this key by a trace that was made elsewhere; whether it fits."""
        sizes = {chunk.id: chunk.nbytes for chunk in self._chunks.values()}
        return self._iterations.plan(key, trace, sizes, [tier.capacity for tier in self.tiers])

    def abandon_iteration(self) -> None:
        """The iteration ended early, by an exception for example; no plan is made of it.

        What had been recorded of it is left in `abandoned`.
        """
        self._iterations.abandon()

    @property
    def plans(self) -> dict[Hashable, Playback]:
        """The plans made so far, by the key of the iteration."""
        return self._iterations.plans

    @property
    def plan(self) -> Plan | None:
        """The plan that the running iteration follows."""
        playback = self._iterations.playback
        return None if playback is None else playback.plan

    @property
    def recorded(self) -> Trace | None:
        """What has been recorded of this iteration so far, if it is the first of its kind."""
        recorder = self._iterations.recorder
        return None if recorder is None else recorder.trace

    @property
    def abandoned(self) -> Trace | None:
        """What had been recorded of the last iteration that was abandoned."""
        return self._iterations.abandoned

    # Reporting

    def report(self) -> MemoryReport:
        names = [tier.name for tier in self.tiers]
        return MemoryReport(
            {
                account.name: TierUsage(
                    account.in_use,
                    account.peak,
                    account.capacity,
                    tier.spool.length if isinstance(tier, DiskTier) else 0,
                )
                for account, tier in zip(self.ledger.tiers, self.tiers, strict=True)
            },
            {f"{names[s]}->{names[t]}": n for (s, t), n in sorted(self._residency.moved.items())},
        )

    def settle(self) -> None:
        """Wait until nothing moves any more."""
        self._mend()
        try:
            while self._residency.in_flight:
                self._mover.wait_for_one(loads=False)
        except BaseException as error:
            self._doubt_unless_ours(error)
            raise

    def close(self) -> None:
        """Stop the transfers and give the tiers back. Closing twice is harmless."""
        self._residency.close()

    # Inside

    def _doubt(self) -> None:
        """What is written in the books may be half of a change."""
        self._in_doubt = True

    def _doubt_unless_ours(self, error: BaseException) -> None:
        """An error of ours is raised between changes; any other may have come in one."""
        if not isinstance(error, PatrickStarError):
            self._in_doubt = True

    def _mend(self) -> None:
        """Make the books right if they are in doubt. Waits for copies that have begun."""
        if self._in_doubt:
            self._residency.mend([use for lease in self._leases for use in lease.pinned])
            self._mover.mend()
            self._iterations.abandon()
            self._in_doubt = False

    def _begin_use(self, lease: Lease) -> None:
        self._mend()
        try:
            self._leases.add(lease)
            self._acquire(lease.uses, lease.pinned)
        except BaseException as error:
            lease.pinned.clear()
            self._doubt_unless_ours(error)
            raise

    def _end_use(self, lease: Lease) -> None:
        try:
            pinned, lease.pinned = lease.pinned, []
            self._unpin(pinned)
            self._mover.keep(())
        except BaseException as error:
            self._doubt_unless_ours(error)
            raise

    def _release(self, chunk: Chunk) -> None:
        self._mover.settle(chunk.id)
        in_use = any(self.ledger.entry(chunk.id).pins)
        if not in_use and self.ledger.is_valid(chunk.id, 0) and self.is_referenced(chunk):
            self._mover.let_die(chunk.id)
            self._residency.wrote(chunk.id, 0)
        else:
            self._mover.revive(chunk.id)
            self._residency.blank(chunk.id)
        if self._iterations.recorder is not None:
            self._iterations.recorder.blanked(chunk.id)

    def _evict(self, chunk: Chunk, tier: int) -> None:
        if self.ledger.state(chunk.id, tier) is CopyState.LOADING:
            self._mover.settle(chunk.id)
        self._mover.bury()
        if self.ledger.is_valid(chunk.id, tier):
            if self._residency.is_in_use(chunk.id, tier):
                raise ChunkStateError(
                    f"chunk {chunk.id} is in use on {self.tiers[tier].name}, or a tensor that is "
                    "no permanent view still refers to its storage; it cannot be evicted"
                )
            self._mover.evict(chunk.id, tier, Why.ASKED)

    def _set_other(self, tier: int, nbytes: int) -> None:
        # What is there already stays on the books while room is made: it is there.
        grown = nbytes - self.ledger.tiers[tier].other
        if grown > 0:
            self._mover.make_room({tier: grown}, what="activations and other tensors need")
        self._residency.set_other(tier, nbytes)
        if self._iterations.recorder is not None:
            self._iterations.recorder.other(tier, nbytes)

    def _acquire(self, uses: tuple[Use, ...], pinned: list[Use]) -> None:
        """Bring chunks and pin them in `pinned`, all or none.

        Each is pinned as soon as it is there: while the next one is waited for, it must neither
        leave nor be saved. Old contents are given up last, when every chunk has its place.
        """
        try:
            self._acquire_now(uses, pinned)
        except BudgetError:
            if not self._lower_the_guess():
                raise
            self._acquire_now(uses, pinned)

    def _lower_the_guess(self) -> bool:
        """Whether a run off its trace assumed more memory than the trace had; it no longer does."""
        playback, lower = self._iterations.playback, False
        if playback is not None and playback.strayed:
            for tier, account in enumerate(self.ledger.tiers):
                if account.other > (there := playback.other_here(tier)):
                    self._residency.set_other(tier, there)
                    lower = True
        return lower

    def _acquire_now(self, uses: tuple[Use, ...], pinned: list[Use]) -> None:
        self._refuse_when_over()
        if self._due:
            wanted = frozenset(use.chunk for use in uses)
            for due in self._due.before(uses):
                self._do(due, wanted)
        if self._mover.is_idle and self._are_there(uses) and self._pass(uses):
            self._mover.keep(uses)
            for use in uses:
                if use.access is not Access.READ:
                    self.ledger.wrote(use.chunk, use.tier)
                self._pin(use, pinned)
            return
        self._mover.keep(uses)
        try:
            self._begin_moment(uses)
            for use in uses:
                if use.access.reads or self._has_valid(use):
                    self._ensure(use)
                    self._pin(use, pinned)
            if len(pinned) < len(uses):
                there = set(pinned)
                self._renew([use for use in uses if use not in there], pinned)
        except BaseException:
            self._unpin(pinned)
            pinned.clear()
            self._mover.keep(())
            raise
        try:
            self._mover.pump()  # there is no more room to be made for this access
        except Exception as error:  # of another chunk; old contents here are gone already
            self._failure = error

    def _are_there(self, uses: tuple[Use, ...]) -> bool:
        """Whether these can be used without moving or giving up a copy; nothing moves now."""
        entry = self.ledger.entry
        for use in uses:
            copies = entry(use.chunk).copies
            if copies[use.tier] is not CopyState.VALID:
                return False
            if use.access is not Access.READ and copies.count(CopyState.VALID) > 1:
                return False
        return True

    def _pass(self, uses: tuple[Use, ...]) -> bool:
        """Go on to the moment of these uses if it asks for nothing; if it does, stay.

        With room for everything most moments are like that, and a use costs little.
        """
        if self._iterations.stay(uses):
            return True
        playback = self._iterations.playback
        if playback is None or self._residency.observer is not None:
            return False
        position = playback.calm(uses)
        if position < 0:
            return False
        others = playback.others(position)
        for account, nbytes in zip(self.ledger.tiers, others, strict=False):
            if nbytes - account.other > account.room:
                return False
        for tier, nbytes in enumerate(others):
            if self.ledger.tiers[tier].other != nbytes:
                self._residency.set_other(tier, nbytes)
        self._iterations.go_on(uses, position)
        return True

    def _refuse_when_over(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self._residency.refuse_when_over()

    def _begin_moment(self, now: tuple[Use, ...]) -> None:
        actions = self._iterations.moment(now, lambda: self._held(now))
        if actions is None:
            return
        if self._residency.observer is not None:
            self._residency.observer.moment(now)
        for action in actions:
            self._mover.schedule(action)
        playback = self._iterations.playback
        if playback is not None:
            for tier in range(max(len(self.tiers) - 1, 1)):
                other = playback.other(tier)
                if self.ledger.tiers[tier].other != other:
                    self._expect_other(playback, tier, other)
        self._mover.pump()

    def _held(self, now: tuple[Use, ...]) -> dict[int, tuple[int, ...]]:
        """The chunks on each tier that are not used now and could not leave either."""
        used = {(use.chunk, use.tier) for use in now}
        held: dict[int, tuple[int, ...]] = {}
        for tier in range(len(self.tiers)):
            stuck = (
                chunk
                for chunk in self.ledger.valid(tier)
                if (chunk, tier) not in used and self._residency.is_in_use(chunk, tier)
            )
            if chunks := tuple(sorted(stuck)):
                held[tier] = chunks
        return held

    def _expect_other(self, playback: Playback, tier: int, nbytes: int) -> None:
        try:
            self._set_other(tier, nbytes)
        except BudgetError:
            if not playback.strayed:
                raise
            # The largest of another path is a guess; what is there must do.
            account = self.ledger.tiers[tier]
            self._residency.set_other(tier, max(0, int(min(nbytes, account.room + account.other))))

    def _pin(self, use: Use, pinned: list[Use]) -> None:
        self.ledger.pin(use.chunk, use.tier, writes=use.access.writes)
        pinned.append(use)

    def _unpin(self, pinned: Sequence[Use]) -> None:
        for use in pinned:
            self.ledger.unpin(use.chunk, use.tier, writes=use.access.writes)

    def _has_valid(self, use: Use) -> bool:
        if self.ledger.state(use.chunk, use.tier) is CopyState.LOADING:
            self._mover.settle(use.chunk)
        return self.ledger.is_valid(use.chunk, use.tier)

    def _ensure(self, use: Use) -> None:
        """Have valid contents on the tier; if they are to be written, nowhere else."""
        chunk, tier = use.chunk, use.tier
        if self._mover.is_dying(chunk):  # used again before the last reference was gone
            self._revive(chunk)
        if self.ledger.is_blank(chunk):
            self._mover.make_room({tier: self._chunks[chunk].nbytes})
            self._residency.create([(chunk, tier)], zero=True)
        else:
            self._mover.bring(chunk, tier)
        if use.access.writes:
            self._mover.settle(chunk)
            self._residency.wrote(chunk, tier)
        self.ledger.touch(chunk, tier)

    def _revive(self, chunk: int) -> None:
        self._mover.revive(chunk)
        self._mover.settle(chunk)
        if self.ledger.is_valid(chunk, 0) and self._residency.is_in_use(chunk, 0):
            self._residency.wrote(chunk, 0)
            self.tensor(self._chunks[chunk]).data.zero_()  # what autograd saw is no contents
        else:
            self._residency.blank(chunk)

    def _renew(self, uses: Sequence[Use], pinned: list[Use]) -> None:
        """Give chunks whose contents are replaced a place on tiers where they have none."""
        places = list({(use.chunk, use.tier): None for use in uses})
        need: dict[int, int] = {}
        for chunk, tier in places:
            if any(self.ledger.entry(chunk).pins):
                raise ChunkStateError(f"chunk {chunk} is in use; its contents cannot be given up")
            need[tier] = need.get(tier, 0) + self._chunks[chunk].nbytes
        while True:
            self._mover.make_room(need)
            moving = [chunk for chunk, _ in places if self._residency.is_moving(chunk)]
            if not moving:
                break
            self._mover.settle(moving[0])
        new = [place for place in places if not self.ledger.is_valid(*place)]
        self._residency.create(new, zero=False)
        for chunk, tier in places:  # one of them may have come while another was waited for
            self._mover.revive(chunk)
            self._residency.wrote(chunk, tier)
        for use in uses:
            self._pin(use, pinned)
