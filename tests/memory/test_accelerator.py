"""The tier of an accelerator, with the CPU standing for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from patrickstar.errors import BudgetError
from patrickstar.memory import Access, ChunkManager, DiskTier, Lru, Spool, Use
from patrickstar.memory.accelerator import AcceleratorTier
from patrickstar.memory.pinned import PinnedTier, page_lock

KIB = 1024
CPU = torch.device("cpu")


class Recorded:
    """Copies that note when they were prepared and when they were made."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.queued = 0  # work that the host has given to the device

    def mark(self) -> int:
        self.events.append(("mark", self.queued))
        return self.queued

    def copy(self, target: torch.Tensor, source: torch.Tensor, mark: int) -> None:
        self.events.append(("copy", mark))
        target.copy_(source)


def make_manager(folder: Path, copies: Recorded | None = None) -> ChunkManager:
    return ChunkManager(
        [
            AcceleratorTier("device", 32 * KIB, CPU, copies),
            PinnedTier("host", 64 * KIB, page_lock(CPU)),
            DiskTier("disk", Spool(folder)),
        ],
        policy=Lru(),
    )


def test_a_copy_waits_for_the_work_that_was_queued_when_it_began(tmp_path: Path) -> None:
    copies = Recorded()
    manager = make_manager(tmp_path, copies)
    chunk = manager.create(4096, torch.float32)
    with manager.use([Use(chunk.id, Access.OVERWRITE)]):
        manager.tensor(chunk).fill_(3)
    copies.queued = 1
    manager.evict(chunk)
    copies.queued = 2
    with manager.use([Use(chunk.id, Access.READ)]):
        assert bool((manager.tensor(chunk) == 3).all())
    assert copies.events == [("mark", 1), ("copy", 1), ("mark", 2), ("copy", 2)]
    manager.close()


def test_a_permanent_view_survives_that_its_chunk_leaves(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    chunk = manager.create(4096, torch.float32)
    with manager.use([Use(chunk.id, Access.OVERWRITE)]):
        view = torch.nn.Parameter(manager.tensor(chunk)[:10].detach())
        manager.keep_view(chunk, view)
        manager.tensor(chunk).fill_(5)
    manager.evict(chunk)
    assert view.untyped_storage().nbytes() == 0
    with manager.use([Use(chunk.id, Access.READ)]):
        assert view.tolist() == [5.0] * 10
    manager.close()


def test_a_view_in_use_keeps_its_chunk_on_the_device(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    chunk = manager.create(4096, torch.float32)
    with manager.use([Use(chunk.id, Access.OVERWRITE)]):
        view = manager.tensor(chunk)[:10]
    others = [manager.create(4096, torch.float32) for _ in range(2)]
    with manager.use([Use(others[0].id, Access.OVERWRITE)]):
        pass
    with pytest.raises(BudgetError):
        with manager.use([Use(other.id, Access.OVERWRITE) for other in others]):
            pass
    del view
    with manager.use([Use(other.id, Access.OVERWRITE) for other in others]):
        pass
    manager.close()


def test_chunks_that_are_away_take_nothing_of_the_device(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    device = manager.tiers[0]
    assert isinstance(device, AcceleratorTier)
    for _ in range(6):
        chunk = manager.create(4096, torch.float32)
        with manager.use([Use(chunk.id, Access.OVERWRITE)]):
            manager.tensor(chunk).fill_(1)
    held = sum(flat.untyped_storage().nbytes() for flat in device._bytes.values())
    assert held == manager.report().tiers["device"].in_use == 32 * KIB
    assert manager.report().tiers["device"].peak <= 32 * KIB
    manager.close()
