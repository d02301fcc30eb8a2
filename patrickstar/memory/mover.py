"""Deciding what moves: bringing chunks where they are needed, and making room for them.

Two things move chunks. A *need* is served now: `bring` and `make_room` wait for transfers and let
the policy choose who leaves. A *plan* is followed when there is room: loads and departures are
queued in the order they were decided, and `pump` starts what can be started without waiting.

After every wait the next step is chosen anew: while one chunk is waited for, others may move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from patrickstar.errors import BudgetError
from patrickstar.memory.iterations import Iterations
from patrickstar.memory.ledger import CopyState
from patrickstar.memory.observer import Why
from patrickstar.memory.planner import Action
from patrickstar.memory.policy import Candidate, Policy, RankingPolicy
from patrickstar.memory.residency import Residency
from patrickstar.memory.sizes import format_budget, format_bytes, size_at_least
from patrickstar.memory.trace import Use


class Mover:
    """Moves chunks between tiers, inside the budgets.

    Args:
        iterations: knows when chunks are used next, if the iteration is planned.

    Attributes:
        kept: the chunks and tiers that the current access was promised.
    """

    def __init__(self, residency: Residency, policy: Policy, iterations: Iterations) -> None:
        self.residency, self.ledger = residency, residency.ledger
        self._policy, self._iterations = policy, iterations
        self.kept: frozenset[tuple[int, int]] = frozenset()
        # Copies that are to come and to go, by chunk and tier, in the order this was decided.
        self._loads: dict[tuple[int, int], None] = {}
        self._leaving: dict[tuple[int, int], None] = {}
        self._dying: dict[int, None] = {}  # released, but something still refers to them

    # Following a plan

    def schedule(self, action: Action) -> None:
        """Queue what a plan says."""
        key = (action.chunk, action.tier)
        if action.chunk not in self.residency.chunks:
            return
        if action.kind == "load":
            self._leaving.pop(key, None)
            self._loads[key] = None
        elif action.kind == "evict":
            self._loads.pop(key, None)
            self._leaving[key] = None
        else:
            self._try_save(*key)

    def expect(self, chunk: int, tier: int) -> None:
        """Queue a load."""
        self._loads[chunk, tier] = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and nothing queued."""
        return not (self.residency.in_flight or self._leaving or self._loads or self._dying)

    def keep(self, uses: tuple[Use, ...]) -> None:
        """These are needed now: nothing queued applies to their places any more."""
        self.kept = frozenset((use.chunk, use.tier) for use in uses)
        if self._leaving or self._loads:
            for use in uses:
                self._leaving.pop((use.chunk, use.tier), None)
                self._loads.pop((use.chunk, use.tier), None)

    def _is_kept(self, chunk: int, tier: int) -> bool:
        return (chunk, tier) in self.kept

    def forget_plan(self) -> None:
        self._loads.clear()
        self._leaving.clear()

    def mend(self) -> None:
        """Forget what was promised and queued; released contents stay released."""
        self.kept = frozenset()
        self.forget_plan()
        for chunk in [c for c in self._dying if c not in self.residency.chunks]:
            del self._dying[chunk]

    def pump(self, *, loads: bool = True) -> None:
        """Finish what is done and start what can be started, without waiting."""
        if self.is_idle:
            return
        while self.residency.finish_one(wait=False):
            pass
        self.bury()
        for key in list(self._leaving):
            self._try_leave(*key)
        while loads and self._loads:
            chunk, tier = next(iter(self._loads))
            if chunk in self.residency.chunks and not self._try_load(chunk, tier):
                break
            del self._loads[chunk, tier]

    def _try_leave(self, chunk: int, tier: int) -> None:
        if chunk not in self.residency.chunks or not self.ledger.is_valid(chunk, tier):
            del self._leaving[chunk, tier]
        elif not self._is_kept(chunk, tier) and self.residency.can_leave(chunk, tier):
            if self.residency.is_saved(chunk, tier):
                del self._leaving[chunk, tier]
                self.residency.drop(chunk, tier, Why.PLAN)
            elif self.ledger.state(chunk, tier + 1) is CopyState.ABSENT:
                self._try_save(chunk, tier)

    def _try_save(self, chunk: int, tier: int) -> None:
        there = self.ledger.is_valid(chunk, tier) and self.residency.can_leave(chunk, tier)
        if not there or self.residency.is_saved(chunk, tier):
            return
        entry = self.ledger.entry(chunk)
        absent = entry.copies[tier + 1] is CopyState.ABSENT
        if absent and self.residency.fits(tier + 1, entry.nbytes):
            self.residency.start(chunk, tier, tier + 1)

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
        if not self.residency.fits(tier, self.residency.nbytes(chunk)):
            return False
        self.residency.start(chunk, source, tier)
        return True

    # Released contents

    def let_die(self, chunk: int) -> None:
        """Released contents stay as long as something refers to them."""
        self._dying[chunk] = None

    def is_dying(self, chunk: int) -> bool:
        return chunk in self._dying

    def revive(self, chunk: int) -> None:
        """The chunk is used again, or its contents are gone."""
        self._dying.pop(chunk, None)

    def bury(self) -> bool:
        """Give up released contents that nothing refers to any more; whether there were any."""
        dead = [
            chunk
            for chunk in self._dying
            if not self.residency.is_moving(chunk) and not self.residency.is_in_use(chunk, 0)
        ]
        for chunk in dead:
            self.residency.blank(chunk)
            del self._dying[chunk]
        return bool(dead)

    # Serving a need

    def bring(self, chunk: int, tier: int) -> None:
        """Copy a chunk with contents to `tier`, one tier at a time."""
        nbytes = self.residency.nbytes(chunk)
        while not self.ledger.is_valid(chunk, tier):
            source = self.ledger.source(chunk, tier)
            if self.ledger.state(chunk, tier) is CopyState.LOADING or source is None:
                self.wait_for_one()
            elif source > tier + 1:
                self.bring(chunk, tier + 1)
            elif not self.residency.fits(tier, nbytes):
                self._free_some(tier, nbytes)
            else:
                self.residency.start(chunk, source, tier)

    def make_room(self, need: Mapping[int, int], what: str = "a chunk needs") -> None:
        """Evict until `need` bytes, by tier, fit; waits for transfers when nothing can leave.

        Raises:
            BudgetError: what is there cannot leave. No contents are lost.
        """
        fits = self.residency.fits
        while lacking := [tier for tier, nbytes in need.items() if not fits(tier, nbytes)]:
            self._free_some(lacking[0], need[lacking[0]], what)

    def evict(self, chunk: int, tier: int, why: Why) -> None:
        """Make a chunk leave `tier`, saving it first if it has to be."""
        lower = tier + 1
        nbytes = self.residency.nbytes(chunk)
        while self.ledger.is_valid(chunk, tier):
            planned = (chunk, tier) in self._leaving
            dirty = self.ledger.is_dirty(chunk, tier)
            saved = self.residency.is_saved(chunk, tier) if planned else not dirty
            if saved and not self.ledger.entry(chunk).locks[tier]:
                self.residency.drop(chunk, tier, Why.PLAN if planned else why)
            elif dirty and lower == len(self.residency.tiers):
                raise self._no_room(tier, nbytes, "a chunk would have to leave")
            elif self.residency.is_moving(chunk):
                self.wait_for_one(loads=False)
            elif not self.residency.fits(lower, nbytes):
                self._free_some(lower, nbytes)
            else:
                self.residency.start(chunk, tier, lower)

    def wait_for_one(self, *, loads: bool = True) -> None:
        """Wait until some transfer ends, and start what that makes possible."""
        self.residency.finish_one(wait=True)
        self.pump(loads=loads)

    def settle(self, chunk: int) -> None:
        """Wait until no transfer of `chunk` is under way."""
        while self.residency.is_moving(chunk):
            self.wait_for_one()

    def _free_some(self, tier: int, nbytes: int, what: str = "a chunk needs") -> None:
        """A step towards `nbytes` of room on `tier`: chunks leave, or a transfer ends.

        Chunks that the plan lets leave go first, even if their saving has to be waited for: any
        other choice would move more.
        """
        if self.bury():
            return
        planned = [chunk for chunk, at in self._leaving if at == tier and self._may_go(chunk, tier)]
        in_flight = self.residency.in_flight
        if not planned and in_flight and self._is_leaving(tier):
            self.wait_for_one(loads=False)
        elif planned or next(self._going(tier), None) is not None:
            self._evict_some(tier, nbytes, planned)
        elif in_flight:
            self.wait_for_one(loads=False)
        else:
            raise self._no_room(tier, nbytes, what)

    def _may_go(self, chunk: int, tier: int) -> bool:
        """Whether a chunk could leave `tier` now, or as soon as it is saved."""
        if chunk not in self.residency.chunks or not self.ledger.is_valid(chunk, tier):
            return False
        if not self.residency.can_leave(chunk, tier) or self._is_kept(chunk, tier):
            return False
        return tier + 1 < len(self.residency.tiers) or not self.ledger.is_dirty(chunk, tier)

    def _going(self, tier: int) -> Iterator[int]:
        """Chunks that could leave `tier`, the longest unused first."""
        return (chunk for chunk in self.ledger.valid(tier) if self._may_go(chunk, tier))

    def _evict_some(self, tier: int, nbytes: int, planned: Sequence[int]) -> None:
        """Evict the policy's choice, or another if the tier below has no room for that.

        What it would choose next goes too, as long as room is lacking and nothing else changes.

        Args:
            planned: chunks to choose from; if there are none, from all.
        """
        refused: BudgetError | None = None
        most = float("inf")  # what has to be saved must be smaller than this
        while True:
            candidates = (
                candidate
                for chunk in (planned or self._going(tier))
                if not (candidate := self._candidate(chunk, tier)).dirty or candidate.nbytes < most
            )
            chosen = self._choose(candidates, nbytes - self.ledger.tiers[tier].room)
            if not chosen:
                assert refused is not None
                raise refused
            try:
                self.evict(chosen[0].chunk, tier, Why.ROOM)
                break
            except BudgetError as error:
                refused, most = error, chosen[0].nbytes
        for candidate in chosen[1:]:
            chunk, dirty = candidate.chunk, candidate.dirty
            if self.residency.fits(tier, nbytes) or not self._may_go(chunk, tier):
                return
            if self.ledger.is_dirty(chunk, tier) != dirty:
                return
            try:
                self.evict(chunk, tier, Why.ROOM)
            except BudgetError:  # another may have room below
                return

    def _choose(self, candidates: Iterable[Candidate], nbytes: float) -> list[Candidate]:
        """The policy's choice, and what it would choose next if it has `nbytes` less than that."""
        if not isinstance(self._policy, RankingPolicy):
            seen = list(candidates)
            return [self._policy.choose(seen)] if seen else []
        chosen = []
        for candidate in self._policy.rank(candidates):
            chosen.append(candidate)
            nbytes -= candidate.nbytes
            if nbytes <= 0:
                break
        return chosen

    def _is_leaving(self, tier: int) -> bool:
        """Whether a chunk that the plan lets leave `tier` is being saved."""
        return any(
            at == tier and chunk in self.residency.chunks and self.ledger.entry(chunk).locks[tier]
            for chunk, at in self._leaving
        )

    def _candidate(self, chunk: int, tier: int) -> Candidate:
        entry = self.ledger.entry(chunk)
        return Candidate(
            chunk,
            entry.nbytes,
            self.ledger.is_dirty(chunk, tier),
            entry.loaded_at[tier],
            entry.used_at[tier],
            *self._iterations.next_use(chunk, tier),
        )

    def _no_room(self, tier: int, nbytes: int, what: str) -> BudgetError:
        account = self.ledger.tiers[tier]
        smallest = account.in_use + nbytes
        assert account.capacity is not None
        return BudgetError(
            f"the {account.name} budget of {format_budget(account.capacity)} is too small: {what} "
            f"{format_bytes(nbytes)} while {format_bytes(account.in_use)} cannot leave. "
            f"The smallest budget that gets past this point is {size_at_least(smallest)} "
            f"({smallest} bytes)",
            tier=account.name,
            budget=account.capacity,
            smallest=smallest,
        )
