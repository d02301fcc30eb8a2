"""What the memory manager is told while the operators of an iteration run."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from patrickstar.engine.segments import Segments
from patrickstar.memory import ChunkManager, CpuTier

MIB = 1 << 20


class Allocator:
    """What a device tells of its peak: the most since it was asked last."""

    most = 0

    def __call__(self) -> int:
        most, self.most = self.most, 0
        return most


@pytest.fixture
def manager() -> Iterator[ChunkManager]:
    made = ChunkManager([CpuTier("device", 8 * MIB), CpuTier("host", 8 * MIB)])
    yield made
    made.close()


def watched(manager: ChunkManager, allocator: Allocator) -> Segments:
    overlap = SimpleNamespace(begin=lambda key: key, traced=lambda key, trace: None)
    early = SimpleNamespace(begin=lambda key: None, traced=lambda key, trace, overlap: None)
    return Segments(manager, torch.device("cpu"), 0, overlap, early, allocator)  # type: ignore[arg-type]


def test_what_a_device_had_given_out_before_an_operator_is_no_need_of_it(
    manager: ChunkManager,
) -> None:
    allocator = Allocator()
    with watched(manager, allocator).forward("key"):
        allocator.most = 10 * MIB  # chunks that came, and left to make room
        torch.ones(16)
    assert manager.report().tiers["device"].peak < MIB
