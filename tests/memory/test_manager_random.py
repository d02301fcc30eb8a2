"""Any sequence of operations keeps contents, states and budgets right.

The model is a dict from chunk to the tensor it should hold. Transfers run against an adversary
that copies as early or as late as it can, in any order.
"""

from __future__ import annotations

import errno
import random
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patrickstar.errors import BudgetError, ChunkStateError, SpoolError
from patrickstar.memory import (
    Access,
    Chunk,
    ChunkManager,
    CpuTier,
    DiskTier,
    Fifo,
    FurthestNextUse,
    Lru,
    Spool,
    Tier,
    Use,
)
from patrickstar.memory.accelerator import AcceleratorTier
from patrickstar.memory.ledger import CopyState
from patrickstar.memory.pinned import PinnedTier, page_lock
from patrickstar.memory.tiers import MemoryTier
from tests.memory.adversary import Adversary, contents

PAGE = 4096
POLICIES = (FurthestNextUse, Lru, Fifo)


class Run:
    """A manager and its model, driven by a random source.

    `failing` is the probability that a transfer, or getting a place on a tier, fails.
    """

    def __init__(
        self, seed: int, tiers: list[Tier], *, prefetch: bool, policy: Any, failing: float = 0.0
    ) -> None:
        self.random = random.Random(seed)
        self.failing = failing
        self.failures = 0
        self.manager = ChunkManager(tiers, policy=policy(), prefetch=prefetch)
        self.manager._residency._threads.close()
        self.threads = Adversary(
            self.manager,
            late=lambda: self.random.random() < 0.7,
            ready=lambda: self.random.random() < 0.3,
            pick=self.random.randrange,
            fails=self.fails,
        )
        for tier in tiers:
            self.make_flaky(tier)
        self.manager._residency._threads = self.threads  # type: ignore[assignment]
        self.chunks: dict[int, Chunk] = {}
        self.model: dict[int, torch.Tensor] = {}
        self.held: dict[int, list[torch.Tensor]] = {}  # views of chunks that a caller keeps
        self.last_words: dict[int, torch.Tensor] = {}  # of released chunks that are still held
        self.promised: list[int] = []  # by the last access, until the next one
        self.pinned: list[Use] = []
        self.counter = 0
        self.refused = 0

    def fails(self) -> bool:
        failed = self.random.random() < self.failing
        self.failures += failed
        return failed

    def make_flaky(self, tier: Any) -> None:
        take = tier.take

        def take_or_fail(chunk: int, nbytes: int, *, zero: bool) -> None:
            if self.fails():
                raise SpoolError(errno.ENOSPC, "the disk is full")
            take(chunk, nbytes, zero=zero)

        tier.take = take_or_fail

    def create(self) -> None:
        pages = self.random.choice([1, 1, 2, 3])
        chunk = self.manager.create(pages * PAGE // 4, torch.int32)
        self.chunks[chunk.id] = chunk
        self.model[chunk.id] = torch.zeros(chunk.numel, dtype=torch.int32)

    def use(self, uses: list[Use], depth: int = 0) -> None:
        """Use chunks as they say, checking and changing their contents; perhaps nested."""
        if not self.may_use(uses):
            return
        self.promised = []
        try:
            with self.manager.use(uses):
                self.pinned += uses
                try:
                    for use in uses:
                        self.touch(use)
                    self.check()
                    if depth < 2 and self.random.random() < 0.4:
                        self.use(self.some_uses(), depth + 1)
                        self.check()
                    for use in uses:
                        assert torch.equal(self.tensor(use), self.model[use.chunk])
                finally:
                    del self.pinned[len(self.pinned) - len(uses) :]
        except BudgetError as error:
            self.refuse(uses, error)
        except SpoolError:
            assert self.failures, "nobody asked for a failure"

    def touch(self, use: Use) -> None:
        tensor, expected = self.tensor(use), self.model[use.chunk]
        if use.access.reads:
            assert torch.equal(tensor, expected), f"{use}"
        if use.access is Access.UPDATE:
            tensor.add_(1)
            expected.add_(1)
        elif use.access is Access.OVERWRITE:
            self.counter += 1
            tensor.fill_(self.counter)
            expected.fill_(self.counter)

    def tensor(self, use: Use) -> torch.Tensor:
        return self.manager.tensor(self.chunks[use.chunk], use.tier)

    def may_use(self, uses: list[Use]) -> bool:
        """Whether the uses are legal beside what is in use already."""
        for use in uses:
            for other in self.pinned:
                apart = use.chunk == other.chunk and use.tier != other.tier
                if apart and (use.access.writes or other.access.writes):
                    return False
        for use in uses:  # who keeps a view of the chunk on tier 0 keeps its copy there
            if use.tier != 0 and use.access.writes and self.held.get(use.chunk):
                return False
        return True

    def some_uses(self) -> list[Use]:
        count = min(self.random.choice([1, 1, 2, 3]), len(self.chunks))
        memory = [t for t, home in enumerate(self.manager.tiers) if isinstance(home, MemoryTier)]
        return [
            Use(c, self.random.choice(list(Access)), self.random.choice([0, 0, *memory]))
            for c in self.random.sample(sorted(self.chunks), count)
        ]

    def access(self) -> None:
        """Keep views of chunks, as autograd does for the length of an operator."""
        count = min(self.random.choice([1, 2]), len(self.chunks))
        uses = [Use(c, Access.READ) for c in self.random.sample(sorted(self.chunks), count)]
        if not self.may_use(uses):
            return
        self.promised = []
        try:
            self.manager.access(uses)
        except BudgetError as error:
            self.refuse(uses, error)
            return
        except SpoolError:
            return
        self.promised = [use.chunk for use in uses]
        for use in uses:
            assert torch.equal(self.tensor(use), self.model[use.chunk])
            self.held.setdefault(use.chunk, []).append(self.tensor(use)[1:])

    def let_go(self) -> None:
        if self.held:
            chunk = self.random.choice(sorted(self.held))
            self.held[chunk].pop()
            if not self.held[chunk]:
                del self.held[chunk]

    def evict(self) -> None:
        chunk = self.random.choice(sorted(self.chunks))
        tier = self.random.randrange(len(self.manager.tiers) - 1)
        in_use = any(use.chunk == chunk and use.tier == tier for use in self.pinned)
        try:
            self.manager.evict(self.chunks[chunk], tier)
        except ChunkStateError:
            assert in_use or (tier == 0 and chunk in self.held)
        except BudgetError as error:
            self.refuse([], error)
        except SpoolError:
            pass
        else:
            assert self.manager.ledger.state(chunk, tier) is CopyState.ABSENT

    def prefetch(self) -> None:
        chunk = self.random.choice(sorted(self.chunks))
        with suppress(SpoolError):
            self.manager.prefetch(self.chunks[chunk], self.random.choice([0, 0, 1]))

    def release(self) -> None:
        chunk = self.random.choice(sorted(self.chunks))
        with suppress(SpoolError):
            self.manager.release(self.chunks[chunk])
            self.last_words.setdefault(chunk, self.model[chunk].clone())
            self.model[chunk].zero_()

    def delete(self) -> None:
        if len(self.chunks) > 2:
            chunk = self.random.choice(sorted(self.chunks))
            if chunk in self.held:
                with pytest.raises(ChunkStateError, match="still refers to chunk"):
                    self.manager.delete(self.chunks[chunk])
                return
            with suppress(SpoolError):
                self.manager.delete(self.chunks[chunk])
                del self.chunks[chunk], self.model[chunk]
                self.promised = [c for c in self.promised if c != chunk]

    def other(self) -> None:
        tier = self.random.randrange(len(self.manager.tiers) - 1)
        nbytes = self.random.choice([0, 1, 2, 3]) * PAGE
        before = self.manager.ledger.tiers[tier].other
        try:
            self.manager.set_other(tier, nbytes)
        except BudgetError as error:
            self.refuse([], error, grown=nbytes - before)
            assert self.manager.ledger.tiers[tier].other == before
        except SpoolError:
            assert self.manager.ledger.tiers[tier].other == before

    def refuse(self, uses: list[Use], error: BudgetError, grown: int = 0) -> None:
        """A budget may only be refused when it really is too small."""
        self.refused += 1
        ledger = self.manager.ledger
        tier = next(t for t, a in enumerate(ledger.tiers) if a.name == error.tier)
        account = ledger.tiers[tier]
        stuck = {use.chunk for use in (*self.pinned, *uses) if use.tier == tier}
        if tier == 0:
            stuck |= set(self.held) | set(self.promised)
        largest = max(chunk.nbytes for chunk in self.chunks.values())
        playback = self.manager._iterations.playback
        expected = playback.plan.trace.peak_other(tier) if playback is not None else 0
        need = sum(self.chunks[c].nbytes for c in stuck) + max(account.other + grown, expected)
        passing = largest * (1 + len(uses)) if tier else 0  # what passes on its way down or up
        assert account.capacity is not None
        assert need + passing > account.capacity, f"refused without need: {error}"
        assert error.smallest > account.capacity

    def iterate(self) -> None:
        """An iteration of a kind seen before, or not; perhaps it departs from its trace."""
        key = self.random.choice("ab")
        steps = random.Random(key)
        planned = self.manager.begin_iteration(key)
        assert planned == (key in self.manager.plans)
        self.manager.segment("only")
        chunks = sorted(self.chunks)
        for _ in range(steps.randint(3, 10)):
            count = min(steps.choice([1, 1, 2]), len(chunks))
            uses = [
                Use(c, steps.choice(list(Access)), steps.choice([0, 0, 0, 1]))
                for c in steps.sample(chunks, count)
            ]
            tiers = enumerate(self.manager.tiers)
            memory = [t for t, home in tiers if isinstance(home, MemoryTier)]
            uses = [u if u.tier in memory else Use(u.chunk, u.access) for u in uses]
            other = steps.choice([0, 0, 1, 2]) * PAGE
            if not planned and self.random.random() < 0.8:
                before = self.manager.ledger.tiers[0].other
                try:
                    self.manager.set_other(0, other)
                except BudgetError as error:
                    self.refuse([], error, grown=other - before)
                except SpoolError:
                    assert self.failing
            if self.random.random() < 0.1:
                continue
            if self.random.random() < 0.1:
                self.step(nested=False)
            self.use([u for u in uses if u.chunk in self.chunks], depth=2)
            self.check()
        if self.random.random() < 0.1:
            self.manager.abandon_iteration()
        else:
            self.manager.end_iteration()
        if not planned and self.random.random() < 0.5:
            with suppress(SpoolError):
                self.manager.set_other(0, 0)

    def step(self, *, nested: bool = True) -> None:
        choices = [self.let_go, self.evict, self.prefetch, self.release, self.other, self.access]
        choices += [self.create, self.delete, self.let_go]
        choices += [lambda: self.use(self.some_uses())] * 6
        if nested:
            choices += [self.iterate] * 2
        if not self.chunks:
            self.create()
        self.random.choice(choices)()
        self.check()

    def check(self) -> None:
        """Books, pages and contents agree, and budgets are kept."""
        for chunk in set(self.last_words) - set(self.manager._mover._dying):
            del self.last_words[chunk]  # nobody held it, or it was used again
        ledger, manager = self.manager.ledger, self.manager
        loading = {(p.transfer.chunk, p.transfer.target) for p in self.threads.pending}
        for index, account in enumerate(ledger.tiers):
            taken = [c for c in self.chunks if ledger.state(c, index) is not CopyState.ABSENT]
            assert account.chunks == sum(self.chunks[c].nbytes for c in taken)
            if account.capacity is not None:
                assert account.in_use <= account.peak <= account.capacity
            home = manager.tiers[index]
            if isinstance(home, CpuTier):
                arena = home._arena
                assert arena.committed_bytes == account.chunks
                if account.capacity is not None:
                    physical = arena.committed_bytes + arena.parked_bytes + account.other
                    assert physical <= account.capacity
            elif isinstance(home, PinnedTier):
                assert set(home._used) == set(taken)
                if account.capacity is not None:
                    assert account.in_use + home.parked_bytes <= account.capacity
            elif isinstance(home, AcceleratorTier):
                held = sum(t.untyped_storage().nbytes() for t in home._bytes.values())
                assert held == account.chunks
            else:
                assert isinstance(home, DiskTier)
                assert set(home.slots) == set(taken)
        for chunk, entry in ((c, ledger.entry(c)) for c in self.chunks):
            for tier, state in enumerate(entry.copies):
                assert (state is CopyState.LOADING) == ((chunk, tier) in loading)
                pins = sum(u.chunk == chunk and u.tier == tier for u in self.pinned)
                assert entry.pins[tier] == pins
                if state is CopyState.VALID:
                    expected = self.last_words.get(chunk, self.model[chunk])
                    assert contents(manager, chunk, tier) == expected.numpy().tobytes()
            if chunk in self.held:
                assert entry.copies[0] is CopyState.VALID, "a referenced storage was evicted"
                for view in self.held[chunk]:
                    seen = self.last_words.get(chunk, self.model[chunk])
                    assert torch.equal(view, seen[1:])
            if ledger.is_blank(chunk):
                assert not self.model[chunk].any()

    def finish(self) -> None:
        self.held.clear()
        self.failing = 0.0
        for chunk in self.chunks.values():
            self.use([Use(chunk.id, Access.READ)])
        self.check()
        self.manager.close()


@pytest.fixture(scope="module")
def spool_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("spool")


def tiers_of(kind: str, sizes: tuple[int, int], folder: Any) -> list[Tier]:
    fast, slow = (size * PAGE for size in sizes)
    if kind == "host+disk":
        return [CpuTier("host", fast), DiskTier("disk", Spool(folder))]
    if kind == "device+host":
        return [CpuTier("device", fast), CpuTier("host", None)]
    device: Tier = CpuTier("device", fast)
    host: Tier = CpuTier("host", slow)
    if kind == "accelerator+pinned+disk":
        device = AcceleratorTier("device", fast, torch.device("cpu"))
        host = PinnedTier("host", slow, page_lock(torch.device("cpu")))
    return [device, host, DiskTier("disk", Spool(folder))]


@pytest.mark.parametrize(
    "kind", ["host+disk", "device+host", "device+host+disk", "accelerator+pinned+disk"]
)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.tuples(st.integers(3, 14), st.integers(9, 24)),
    policy=st.sampled_from(POLICIES),
    prefetch=st.booleans(),
    failing=st.sampled_from([0.0, 0.0, 0.1]),
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_sequence_of_operations_keeps_contents_states_and_budgets_right(
    kind: str,
    spool_folder: Any,
    seed: int,
    sizes: tuple[int, int],
    policy: Any,
    prefetch: bool,
    failing: float,
) -> None:
    with ExitStack() as stack:
        tiers = tiers_of(kind, sizes, spool_folder)
        run = Run(seed, tiers, prefetch=prefetch, policy=policy, failing=failing)
        stack.callback(run.manager.close)
        for _ in range(3):
            run.create()
        for _ in range(40):
            run.step()
        run.finish()
