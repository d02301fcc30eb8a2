"""Page-locked host memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from patrickstar.memory.pinned import PinnedTier, page_lock

KIB = 1024


class Locks:
    """Stands for an accelerator's page locking, and knows what is locked."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def __call__(self, address: int, nbytes: int) -> Callable[[], None]:
        assert address not in self.held
        self.held[address] = nbytes
        return lambda: self.held.__delitem__(address)


def test_every_block_is_locked_once_and_reused_by_the_next_of_its_size() -> None:
    locks = Locks()
    tier = PinnedTier("host", None, locks)
    tier.take(0, 8 * KIB, zero=False)
    first = tier.tensor(0, 8 * KIB, torch.float32, 2048).data_ptr()
    tier.give_back(0)
    tier.take(1, 8 * KIB, zero=False)
    tier.take(2, 4 * KIB, zero=False)
    assert tier.tensor(1, 8 * KIB, torch.float32, 2048).data_ptr() == first
    assert sorted(locks.held.values()) == [4 * KIB, 8 * KIB]


def test_free_blocks_are_unlocked_when_the_budget_has_no_room_for_them() -> None:
    locks = Locks()
    tier = PinnedTier("host", 16 * KIB, locks)
    for chunk in range(2):
        tier.take(chunk, 8 * KIB, zero=False)
    tier.give_back(0)
    tier.settle(8 * KIB, 4 * KIB)
    assert sum(locks.held.values()) == 8 * KIB
    assert tier.parked_bytes == 0


def test_a_reused_block_is_zeros_if_asked() -> None:
    tier = PinnedTier("host", None, Locks())
    tier.take(0, 4 * KIB, zero=True)
    assert not tier.tensor(0, 4 * KIB, torch.int32, 1024).any()
    tier.tensor(0, 4 * KIB, torch.int32, 1024).fill_(7)
    tier.give_back(0)
    tier.take(1, 4 * KIB, zero=True)
    assert not tier.tensor(1, 4 * KIB, torch.int32, 1024).any()


def test_closing_unlocks_what_is_free() -> None:
    locks = Locks()
    tier = PinnedTier("host", None, locks)
    tier.take(0, 4 * KIB, zero=False)
    tier.give_back(0)
    tier.close()
    assert not locks.held


def test_without_an_accelerator_nothing_is_locked() -> None:
    unlock = page_lock(torch.device("cpu"))(0, 4 * KIB)
    unlock()
