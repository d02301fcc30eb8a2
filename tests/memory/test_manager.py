"""What a user of the chunk manager can rely on, one promise a test."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from patrickstar.errors import BudgetError, ChunkStateError
from patrickstar.memory import (
    Access,
    Chunk,
    ChunkManager,
    CpuTier,
    DiskTier,
    Lru,
    MemoryReport,
    Spool,
    TierUsage,
    Use,
)

KIB = 1024
READ, UPDATE, OVERWRITE = Access.READ, Access.UPDATE, Access.OVERWRITE


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ChunkManager]:
    """Room for four chunks of 16 KiB on the host."""
    tiers = [CpuTier("host", 64 * KIB), DiskTier("disk", Spool(tmp_path))]
    manager = ChunkManager(tiers, policy=Lru())
    yield manager
    manager.close()


def make(manager: ChunkManager, value: float | None = None, kib: int = 16) -> Chunk:
    chunk = manager.create(kib * KIB // 4, torch.float32)
    if value is not None:
        with manager.use([Use(chunk.id, OVERWRITE)]):
            manager.tensor(chunk).fill_(value)
    return chunk


def value_of(manager: ChunkManager, chunk: Chunk) -> float:
    with manager.use([Use(chunk.id, READ)]):
        tensor = manager.tensor(chunk)
        assert int((tensor == tensor[0]).sum()) == chunk.numel
        return float(tensor[0])


def on_host(manager: ChunkManager, chunk: Chunk) -> bool:
    return manager.ledger.is_valid(chunk.id, 0)


def test_a_new_chunk_takes_no_memory_until_its_first_use_and_is_zeros_then(
    manager: ChunkManager,
) -> None:
    chunk = make(manager)
    assert manager.report().tiers["host"].in_use == 0
    assert value_of(manager, chunk) == 0
    assert manager.report().tiers["host"].in_use == 16 * KIB


def test_chunks_that_do_not_fit_wait_on_disk(manager: ChunkManager) -> None:
    chunks = [make(manager, value) for value in range(10)]
    assert [value_of(manager, chunk) for chunk in chunks] == list(range(10))
    report = manager.report()
    assert report.tiers["host"].peak == report.tiers["host"].budget == 64 * KIB
    assert report.moved["host->disk"] >= 6 * 16 * KIB
    assert report.moved["disk->host"] >= 6 * 16 * KIB


def test_the_tensor_of_a_chunk_never_changes_its_address(manager: ChunkManager) -> None:
    chunk = make(manager, 1)
    tensor, address = manager.tensor(chunk), manager.tensor(chunk).data_ptr()
    manager.evict(chunk)
    assert not on_host(manager, chunk)
    assert value_of(manager, chunk) == 1
    assert manager.tensor(chunk) is tensor
    assert tensor.data_ptr() == address


def test_only_what_changed_is_written_back(manager: ChunkManager) -> None:
    chunk = make(manager, 1)
    manager.evict(chunk)
    assert value_of(manager, chunk) == 1
    manager.evict(chunk)
    assert manager.report().moved == {"host->disk": 16 * KIB, "disk->host": 16 * KIB}


def test_an_update_makes_the_copy_on_disk_stale(manager: ChunkManager) -> None:
    chunk = make(manager, 1)
    manager.evict(chunk)
    with manager.use([Use(chunk.id, UPDATE)]):
        manager.tensor(chunk).add_(1)
    manager.evict(chunk)
    assert value_of(manager, chunk) == 2


def test_an_overwritten_chunk_is_not_read_from_disk(manager: ChunkManager) -> None:
    chunk = make(manager, 1)
    manager.evict(chunk)
    with manager.use([Use(chunk.id, OVERWRITE)]):
        manager.tensor(chunk).fill_(5)
    assert "disk->host" not in manager.report().moved
    assert value_of(manager, chunk) == 5


def test_a_released_chunk_costs_nothing_and_is_zeros_again(manager: ChunkManager) -> None:
    chunk = make(manager, 1)
    manager.release(chunk)
    assert manager.report().tiers["host"].in_use == 0
    assert value_of(manager, chunk) == 0


def test_who_refers_to_a_released_chunk_still_sees_what_was_there(manager: ChunkManager) -> None:
    chunk = make(manager, 1)
    view = manager.tensor(chunk)[:10]
    manager.release(chunk)
    others = [make(manager, 2) for _ in range(6)]
    assert view.eq(1).all()
    assert value_of(manager, chunk) == 0
    assert view.eq(0).all(), "the chunk has new contents"
    assert [value_of(manager, other) for other in others] == [2] * 6


def test_a_released_chunk_is_gone_with_the_last_reference(manager: ChunkManager) -> None:
    chunk = make(manager, 1)
    view = manager.tensor(chunk)[:10]
    manager.release(chunk)
    del view
    make(manager, 2)
    assert manager.report().tiers["host"].in_use == 16 * KIB
    assert manager.report().moved == {}
    assert value_of(manager, chunk) == 0


def test_a_chunk_in_use_cannot_be_released_evicted_or_deleted(manager: ChunkManager) -> None:
    chunk = make(manager, 1)
    with manager.use([Use(chunk.id, READ)]):
        for forbidden in (manager.release, manager.evict, manager.delete):
            with pytest.raises(ChunkStateError, match="in use"):
                forbidden(chunk)
    assert value_of(manager, chunk) == 1


def test_what_is_referred_to_is_never_evicted(manager: ChunkManager) -> None:
    chunk = make(manager, 1)
    view = manager.tensor(chunk)[5:]
    others = [make(manager, 2) for _ in range(8)]
    assert on_host(manager, chunk)
    assert view.eq(1).all()
    with pytest.raises(ChunkStateError, match="still refers to its storage"):
        manager.evict(chunk)
    with pytest.raises(ChunkStateError, match="drop it before deleting"):
        manager.delete(chunk)
    del view
    assert [value_of(manager, other) for other in others] == [2] * 8
    assert not on_host(manager, chunk)


def test_permanent_views_do_not_keep_a_chunk_and_see_it_when_it_is_back(
    manager: ChunkManager,
) -> None:
    chunk = make(manager)
    view = manager.tensor(chunk)[10:20].view(2, 5)
    assert manager.is_referenced(chunk)
    manager.keep_view(chunk, view)
    assert not manager.is_referenced(chunk)
    with manager.use([Use(chunk.id, UPDATE)]):
        view.fill_(3)
    manager.evict(chunk)
    with manager.use([Use(chunk.id, READ)]):
        assert view.eq(3).all()
    transposed = view.t()
    assert manager.is_referenced(chunk), "a view of a permanent view is no permanent view"
    del transposed
    del view
    gc.collect()
    assert not manager.is_referenced(chunk)


def test_a_permanent_view_may_move_to_another_chunk(manager: ChunkManager) -> None:
    first, second = make(manager, 1), make(manager, 2)
    view = manager.tensor(first)[:4]
    manager.keep_view(first, view)
    view.set_(manager.tensor(second)[:4])  # type: ignore[call-overload]
    manager.keep_view(second, view)
    assert not manager.is_referenced(first)
    assert not manager.is_referenced(second)
    del view
    assert not manager.is_referenced(second)


def test_a_saved_tensor_in_an_autograd_graph_keeps_its_chunk(manager: ChunkManager) -> None:
    chunk = make(manager, 2)
    with manager.use([Use(chunk.id, READ)]):
        x = torch.ones(4, requires_grad=True)
        loss = (x * manager.tensor(chunk)[:4]).sum()
    assert manager.is_referenced(chunk)
    for _ in range(6):
        make(manager, 0)
    loss.backward()
    assert x.grad is not None
    assert x.grad.eq(2).all()
    del loss
    assert not manager.is_referenced(chunk)


def test_uses_that_cannot_fit_together_are_refused_with_the_smallest_budget(tmp_path: Path) -> None:
    def run(budget: int) -> None:
        tiers = [CpuTier("host", budget), DiskTier("disk", Spool(tmp_path))]
        manager = ChunkManager(tiers)
        chunks = [make(manager, value) for value in range(5)]
        try:
            with manager.use([Use(chunk.id, READ) for chunk in chunks]):
                assert [float(manager.tensor(c)[0]) for c in chunks] == [0, 1, 2, 3, 4]
        finally:
            assert [value_of(manager, chunk) for chunk in chunks] == [0, 1, 2, 3, 4]
            manager.close()

    with pytest.raises(BudgetError, match=r"the host budget of 64\.00 KiB is too small") as caught:
        run(64 * KIB)
    assert caught.value.tier == "host"
    assert caught.value.budget == 64 * KIB
    assert caught.value.smallest == 80 * KIB
    run(caught.value.smallest)


def test_a_refused_overwrite_keeps_the_old_contents(manager: ChunkManager) -> None:
    chunks = [make(manager, value) for value in range(5)]
    with pytest.raises(BudgetError), manager.use([Use(chunk.id, OVERWRITE) for chunk in chunks]):
        pass
    assert [value_of(manager, chunk) for chunk in chunks] == [0, 1, 2, 3, 4]


def test_an_exception_inside_a_use_lets_the_chunks_go(manager: ChunkManager) -> None:
    chunk = make(manager, 1)
    with pytest.raises(ZeroDivisionError), manager.use([Use(chunk.id, READ)]):
        _ = 1 / 0
    manager.evict(chunk)
    assert value_of(manager, chunk) == 1


def test_uses_nest(manager: ChunkManager) -> None:
    outer, inner = make(manager, 1), make(manager, 2)
    others = [make(manager, 3) for _ in range(6)]
    with manager.use([Use(outer.id, UPDATE)]):
        manager.tensor(outer).add_(1)
        for other in others:
            assert value_of(manager, other) == 3
        with manager.use([Use(outer.id, READ), Use(inner.id, READ)]):
            assert float(manager.tensor(outer)[0]) == float(manager.tensor(inner)[0]) == 2
        assert on_host(manager, outer)
    assert value_of(manager, outer) == 2


def test_what_is_accessed_stays_until_the_next_access(manager: ChunkManager) -> None:
    first, second = make(manager, 1), make(manager, 2)
    manager.access([Use(first.id, READ), Use(second.id, READ)])
    manager.set_other(0, 32 * KIB)
    with pytest.raises(BudgetError, match="activations and other tensors need"):
        manager.set_other(0, 33 * KIB)
    assert on_host(manager, first)
    assert on_host(manager, second)
    manager.access([Use(second.id, READ)])
    manager.set_other(0, 33 * KIB)
    assert not on_host(manager, first)


def test_memory_that_no_chunk_owns_counts_against_the_budget(manager: ChunkManager) -> None:
    chunks = [make(manager, value) for value in range(4)]
    manager.set_other(0, 40 * KIB)
    assert sum(on_host(manager, chunk) for chunk in chunks) == 1
    assert manager.report().tiers["host"].in_use == 56 * KIB
    with pytest.raises(BudgetError):
        manager.set_other(0, 65 * KIB)
    assert manager.ledger.tiers[0].other == 40 * KIB
    manager.set_other(0, 0)
    assert [value_of(manager, chunk) for chunk in chunks] == [0, 1, 2, 3]


def test_a_prefetched_chunk_is_there_without_waiting(manager: ChunkManager) -> None:
    chunk = make(manager, 7)
    manager.evict(chunk)
    manager.prefetch(chunk)
    moved = manager.report().moved.get("disk->host", 0)
    manager.settle()
    assert on_host(manager, chunk)
    assert moved == 0
    assert value_of(manager, chunk) == 7
    assert manager.report().moved["disk->host"] == 16 * KIB


def test_a_prefetch_never_evicts(manager: ChunkManager) -> None:
    chunk = make(manager, 7)
    manager.evict(chunk)
    others = [make(manager, 1) for _ in range(4)]
    manager.prefetch(chunk)
    assert all(on_host(manager, other) for other in others)
    assert not on_host(manager, chunk)


def test_a_deleted_chunk_gives_its_memory_back(manager: ChunkManager) -> None:
    chunk = make(manager, 1)
    storage = manager.tensor(chunk).untyped_storage()._cdata
    assert manager.owns(storage)
    assert manager.chunk_of(storage) == chunk.id
    manager.delete(chunk)
    assert not manager.owns(storage)
    assert manager.chunk_of(storage) is None
    assert manager.report().tiers["host"].in_use == 0
    with pytest.raises(KeyError):
        manager.chunk(chunk.id)


def test_a_closed_manager_says_so(manager: ChunkManager) -> None:
    chunk = make(manager, 1)
    manager.close()
    manager.close()
    with pytest.raises(ChunkStateError, match="is closed"), manager.use([Use(chunk.id, READ)]):
        pass


def test_chunks_are_used_on_the_tier_that_is_asked_for(tmp_path: Path) -> None:
    tiers = [
        CpuTier("device", 32 * KIB),
        CpuTier("host", 64 * KIB),
        DiskTier("disk", Spool(tmp_path)),
    ]
    manager = ChunkManager(tiers)
    chunks = [make(manager, value) for value in range(8)]
    for chunk in chunks:
        with manager.use([Use(chunk.id, UPDATE, tier=1)]):
            assert not manager.ledger.is_valid(chunk.id, 0), "it is written on the host now"
            manager.tensor(chunk, tier=1).add_(10)
    assert [value_of(manager, chunk) for chunk in chunks] == [10 + n for n in range(8)]
    report = manager.report()
    assert set(report.tiers) == {"device", "host", "disk"}
    assert set(report.moved) <= {"device->host", "host->device", "host->disk", "disk->host"}
    assert report.tiers["device"].peak <= 32 * KIB
    assert report.tiers["host"].peak <= 64 * KIB
    manager.close()


def test_a_full_lowest_tier_drops_copies_that_are_elsewhere_too() -> None:
    manager = ChunkManager([CpuTier("device", 64 * KIB), CpuTier("host", 32 * KIB)], policy=Lru())
    kept = [make(manager, value) for value in range(2)]
    for chunk in kept:  # on both tiers, and used on the device last
        manager.evict(chunk)
        assert value_of(manager, chunk) == float(chunk.id)
    chunks = [make(manager, 5 + n) for n in range(3)]
    assert [value_of(manager, chunk) for chunk in (*kept, *chunks)] == [0, 1, 5, 6, 7]
    make(manager, 8)
    with pytest.raises(BudgetError, match="the host budget"):
        make(manager, 9)
    manager.close()


def test_two_managers_in_one_process_do_not_know_each_other(tmp_path: Path) -> None:
    managers = [
        ChunkManager([CpuTier("host", 32 * KIB), DiskTier("disk", Spool(tmp_path))])
        for _ in range(2)
    ]
    chunks = [[make(m, 10 * i + n) for n in range(5)] for i, m in enumerate(managers)]
    for i, manager in enumerate(managers):
        assert [value_of(manager, c) for c in chunks[i]] == [10 * i + n for n in range(5)]
    managers[0].close()
    assert [value_of(managers[1], c) for c in chunks[1]] == [10, 11, 12, 13, 14]
    storage = managers[0].tensor(chunks[0][0]).untyped_storage()._cdata
    assert not managers[1].owns(storage)
    managers[1].close()


def test_the_readme_of_the_module_runs(tmp_path: Path) -> None:
    manager = ChunkManager([CpuTier("host", 64 << 20), DiskTier("disk", Spool(tmp_path))])
    chunk = manager.create(1_000_000, torch.float32)
    with manager.use([Use(chunk.id, Access.UPDATE)]):
        manager.tensor(chunk).add_(1)
    assert value_of(manager, chunk) == 1
    manager.close()


def test_a_report_of_memory_is_read_a_line_a_tier() -> None:
    tiers = {"host": TierUsage(1 << 20, 3 << 20, 4 << 20), "disk": TierUsage(0, 512, None)}
    assert str(MemoryReport(tiers, {"host->disk": 2048, "disk->host": 0})) == (
        "host        1.00 MiB in use, peak 3.00 MiB, budget 4.00 MiB\n"
        "disk        0 B in use, peak 512 B, no budget\n"
        "host->disk  2.00 KiB moved"
    )
