"""The books against a model: legal transitions do what they say, illegal ones change nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from patrickstar.errors import ChunkStateError
from patrickstar.memory.ledger import CopyState, Ledger

A, L, V = CopyState.ABSENT, CopyState.LOADING, CopyState.VALID


class Model:
    """One chunk, in the plainest terms."""

    def __init__(self, nbytes: int, tiers: int) -> None:
        self.nbytes = nbytes
        self.copies = [A] * tiers
        self.pins = [0] * tiers
        self.writers = [0] * tiers
        self.loads: list[tuple[int, int]] = []  # transfers under way, source and target

    @property
    def valid(self) -> list[int]:
        return [t for t, state in enumerate(self.copies) if state is V]

    def locks(self, tier: int) -> int:
        return sum(source == tier for source, _ in self.loads)


class LedgerAgainstModel(RuleBasedStateMachine):
    @initialize(capacities=st.lists(st.sampled_from([3, 5, 8, None]), min_size=2, max_size=3))
    def start(self, capacities: list[int | None]) -> None:
        self.ledger = Ledger([(f"tier{i}", c) for i, c in enumerate(capacities)])
        self.capacities = capacities
        self.other = [0] * len(capacities)
        self.peak = [0] * len(capacities)
        self.model: dict[int, Model] = {}
        self.next_id = 0

    def used(self, tier: int) -> int:
        chunks = sum(m.nbytes for m in self.model.values() if m.copies[tier] is not A)
        return chunks + self.other[tier]

    def fits(self, tier: int, nbytes: int) -> bool:
        capacity = self.capacities[tier]
        return capacity is None or self.used(tier) + nbytes <= capacity

    def expect(self, legal: bool, call: Any, *args: Any, **kwargs: Any) -> Any:
        """The call works if it is `legal`; otherwise it raises and changes nothing."""
        if legal:
            return call(*args, **kwargs)
        before = copy.deepcopy((self.ledger._entries, self.ledger.tiers))
        with pytest.raises(ChunkStateError):
            call(*args, **kwargs)
        assert (self.ledger._entries, self.ledger.tiers) == before
        return None

    def note_peak(self, tier: int) -> None:
        self.peak[tier] = max(self.peak[tier], self.used(tier))

    def pick(self, data: st.DataObject) -> tuple[int, Model] | None:
        if not self.model:
            return None
        chunk = data.draw(st.sampled_from(sorted(self.model)), "chunk")
        return chunk, self.model[chunk]

    def tier(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.capacities) - 1), "tier")

    @rule(nbytes=st.integers(1, 3))
    def add(self, nbytes: int) -> None:
        self.ledger.add(self.next_id, nbytes)
        self.expect(False, self.ledger.add, self.next_id, nbytes)
        self.model[self.next_id] = Model(nbytes, len(self.capacities))
        self.next_id += 1

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if picked := self.pick(data):
            chunk, model = picked
            legal = set(model.copies) == {A}
            self.expect(legal, self.ledger.remove, chunk)
            if legal:
                del self.model[chunk]

    @rule(data=st.data())
    def create(self, data: st.DataObject) -> None:
        if picked := self.pick(data):
            (chunk, model), tier = picked, self.tier(data)
            legal = set(model.copies) == {A} and self.fits(tier, model.nbytes)
            self.expect(legal, self.ledger.create, chunk, tier)
            if legal:
                model.copies[tier] = V
                self.note_peak(tier)

    @rule(data=st.data())
    def begin_load(self, data: st.DataObject) -> None:
        if picked := self.pick(data):
            (chunk, model), source, target = picked, self.tier(data), self.tier(data)
            legal = (
                model.copies[source] is V
                and not model.writers[source]
                and model.copies[target] is A
                and self.fits(target, model.nbytes)
            )
            self.expect(legal, self.ledger.begin_load, chunk, source, target)
            if legal:
                model.copies[target] = L
                model.loads.append((source, target))
                self.note_peak(target)

    @rule(data=st.data(), works=st.booleans())
    def end_load(self, data: st.DataObject, works: bool) -> None:
        if picked := self.pick(data):
            (chunk, model), source, target = picked, self.tier(data), self.tier(data)
            legal = (source, target) in model.loads
            # The ledger knows the locks of a source, not which target each is for.
            if not legal and model.copies[target] is L and model.locks(source):
                return
            end = self.ledger.finish_load if works else self.ledger.fail_load
            self.expect(legal, end, chunk, source, target)
            if legal:
                model.loads.remove((source, target))
                model.copies[target] = V if works else A

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if picked := self.pick(data):
            (chunk, model), tier = picked, self.tier(data)
            free = model.copies[tier] is V and not model.pins[tier] and not model.locks(tier)
            legal = free and len(model.valid) > 1
            self.expect(legal, self.ledger.drop, chunk, tier)
            if legal:
                model.copies[tier] = A

    @rule(data=st.data())
    def wrote(self, data: st.DataObject) -> None:
        if picked := self.pick(data):
            (chunk, model), tier = picked, self.tier(data)
            others = [t for t in model.valid if t != tier]
            legal = (
                model.copies[tier] is V
                and not model.loads
                and not any(model.pins[t] for t in others)
            )
            assert self.expect(legal, self.ledger.wrote, chunk, tier) == (others if legal else None)
            if legal:
                for other in others:
                    model.copies[other] = A

    @rule(data=st.data())
    def blank(self, data: st.DataObject) -> None:
        if picked := self.pick(data):
            chunk, model = picked
            legal = not any(model.pins) and not model.loads
            valid = model.valid
            assert self.expect(legal, self.ledger.blank, chunk) == (valid if legal else None)
            if legal:
                model.copies = [A] * len(self.capacities)

    @rule(data=st.data(), writes=st.booleans())
    def pin(self, data: st.DataObject, writes: bool) -> None:
        if picked := self.pick(data):
            (chunk, model), tier = picked, self.tier(data)
            legal = model.copies[tier] is V and not (writes and model.locks(tier))
            self.expect(legal, self.ledger.pin, chunk, tier, writes=writes)
            if legal:
                model.pins[tier] += 1
                model.writers[tier] += writes

    @rule(data=st.data(), writes=st.booleans())
    def unpin(self, data: st.DataObject, writes: bool) -> None:
        if picked := self.pick(data):
            (chunk, model), tier = picked, self.tier(data)
            of_this_kind = model.writers[tier] if writes else model.pins[tier] - model.writers[tier]
            self.expect(of_this_kind > 0, self.ledger.unpin, chunk, tier, writes=writes)
            if of_this_kind:
                model.pins[tier] -= 1
                model.writers[tier] -= writes

    @rule(data=st.data(), nbytes=st.integers(0, 3))
    def set_other(self, data: st.DataObject, nbytes: int) -> None:
        tier = self.tier(data)
        if self.fits(tier, nbytes - self.other[tier]):
            self.ledger.set_other(tier, nbytes)
            self.other[tier] = nbytes
            self.note_peak(tier)

    @rule()
    def reset_peak(self) -> None:
        self.ledger.reset_peak()
        self.peak = [self.used(tier) for tier in range(len(self.capacities))]

    @invariant()
    def books_and_model_agree(self) -> None:
        if not hasattr(self, "ledger"):
            return
        ledger = self.ledger
        assert set(ledger.chunks()) == set(self.model)
        for tier, account in enumerate(ledger.tiers):
            assert account.in_use == self.used(tier)
            assert account.peak == self.peak[tier]
            assert account.capacity is None or account.peak <= account.capacity
            valid = [c for c, m in self.model.items() if m.copies[tier] is V]
            by_use = sorted(valid, key=lambda c: ledger.entry(c).used_at[tier])
            assert list(ledger.valid(tier)) == by_use
        for chunk, model in self.model.items():
            entry = ledger.entry(chunk)
            assert entry.copies == model.copies
            assert entry.pins == model.pins
            assert entry.writers == model.writers
            assert entry.locks == [model.locks(t) for t in range(len(self.capacities))]
            assert ledger.is_blank(chunk) == (not model.valid)
            assert ledger.is_being_written(chunk) == any(model.writers)
            for tier in range(len(self.capacities)):
                assert ledger.is_dirty(chunk, tier) == (model.valid == [tier])
                source = ledger.source(chunk, tier)
                distances = [abs(t - tier) for t in model.valid]
                assert (source is None) == (not distances)
                assert source is None or abs(source - tier) == min(distances)


TestLedgerAgainstModel = LedgerAgainstModel.TestCase
TestLedgerAgainstModel.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger([("host", 100), ("disk", None)])
    ledger.add(7, 60)
    return ledger


def test_a_budget_that_would_be_broken_is_refused_with_the_numbers(ledger: Ledger) -> None:
    ledger.create(7, 0)
    ledger.add(8, 50)
    with pytest.raises(ChunkStateError, match=r"chunk 8 \(50 bytes\) does not fit host: 60 of 100"):
        ledger.create(8, 0)


def test_the_only_copy_cannot_be_dropped(ledger: Ledger) -> None:
    ledger.create(7, 0)
    with pytest.raises(ChunkStateError, match="is the only one; save it to a lower tier first"):
        ledger.drop(7, 0)


def test_a_copy_that_is_being_written_cannot_be_copied(ledger: Ledger) -> None:
    ledger.create(7, 0)
    ledger.pin(7, 0, writes=True)
    with pytest.raises(ChunkStateError, match="is being written on host"):
        ledger.begin_load(7, 0, 1)
    ledger.unpin(7, 0, writes=True)
    ledger.begin_load(7, 0, 1)
    with pytest.raises(ChunkStateError, match="is being copied; wait before writing"):
        ledger.pin(7, 0, writes=True)
    ledger.pin(7, 0)


def test_uses_and_arrivals_are_told_apart_by_time(ledger: Ledger) -> None:
    ledger.add(8, 10)
    ledger.create(7, 0)
    ledger.create(8, 0)
    first, second = ledger.entry(7), ledger.entry(8)
    assert first.loaded_at[0] < second.loaded_at[0]
    ledger.touch(7, 0)
    assert first.used_at[0] > second.used_at[0]
    assert first.loaded_at[0] < second.loaded_at[0]
