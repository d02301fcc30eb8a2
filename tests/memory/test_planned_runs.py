"""What a planned run moves is what its plan says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from patrickstar.memory import (
    ChunkManager,
    CpuTier,
    DiskTier,
    FurthestNextUse,
    Lru,
    Policy,
    Spool,
    Tier,
    Trace,
)
from patrickstar.memory.trace import Use

from .traces import gpt_trace

UNIT = 4096


class Moved:
    """Bytes per iteration and pair of tiers."""

    def __init__(self, manager: ChunkManager) -> None:
        self.manager, self.before = manager, dict(manager._residency.moved)

    def since(self) -> dict[tuple[int, int], int]:
        self.manager.settle()  # so that what one iteration began counts there
        now = dict(self.manager._residency.moved)
        moved = {key: now[key] - self.before.get(key, 0) for key in now}
        self.before = now
        return moved


def run(
    manager: ChunkManager, trace: Trace, sizes: dict[int, int], iterations: int
) -> list[dict[tuple[int, int], int]]:
    chunks = [manager.create(sizes[n] // 4, torch.float32) for n in range(len(sizes))]
    moved, record = Moved(manager), []
    for iteration in range(iterations):
        planned = manager.begin_iteration("same")
        manager.segment("all")
        for moment in trace.moments:
            if not planned:
                manager.set_other(0, moment.other.get(0, 0))
            uses = [Use(chunks[u.chunk].id, u.access, u.tier) for u in moment.uses]
            with manager.use(uses):
                for use in uses:
                    if use.access.writes:
                        manager.tensor(manager.chunk(use.chunk), use.tier).fill_(iteration)
            for chunk in moment.blanked:
                manager.release(chunks[chunk])
        manager.end_iteration()
        record.append(moved.since())
    return record


@pytest.mark.parametrize(
    "policy,prefetch",
    # Loading ahead can make LRU keep a chunk that it meant to let go, and move less than it said.
    [(FurthestNextUse(), False), (FurthestNextUse(), True), (Lru(), False)],
    ids=["planned", "planned ahead", "lru"],
)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_on_two_tiers_every_iteration_moves_what_the_plan_says(
    tmp_path: Path, share: float, prefetch: bool, policy: Policy
) -> None:
    trace, sizes = gpt_trace(8, unit=UNIT)
    tiers = [CpuTier("host", int(share * sum(sizes.values()))), DiskTier("disk", Spool(tmp_path))]
    manager = ChunkManager(tiers, policy=policy, prefetch=prefetch)
    record = run(manager, trace, sizes, 7)
    plan = manager.plans["same"].plan
    assert not manager.plans["same"].strayed
    for moved in record[-3:]:
        assert moved == {(0, 1): plan.saved[0], (1, 0): plan.loaded[0]}
    manager.close()


def test_on_three_tiers_iterations_move_about_what_the_plan_says(tmp_path: Path) -> None:
    trace, sizes = gpt_trace(8, unit=UNIT, update_tier=1)
    tiers: list[Tier] = [
        CpuTier("device", 24 * UNIT),
        CpuTier("host", 60 * UNIT),
        DiskTier("disk", Spool(tmp_path)),
    ]
    manager = ChunkManager(tiers)
    record = run(manager, trace, sizes, 7)
    plan = manager.plans["same"].plan
    expected = sum(plan.loaded.values()) + sum(plan.saved.values())
    for moved in record[-3:]:
        assert abs(sum(moved.values()) - expected) <= 0.06 * expected
    manager.close()


def test_a_plan_moves_at_least_30_percent_less_than_lru(tmp_path: Path) -> None:
    trace, sizes = gpt_trace(12, unit=UNIT)
    moved = []
    for policy, plan in ((FurthestNextUse(), True), (Lru(), False)):
        tiers = [CpuTier("host", sum(sizes.values()) // 2), DiskTier("disk", Spool(tmp_path))]
        manager = ChunkManager(tiers, policy=policy, plan=plan)
        moved.append(sum(run(manager, trace, sizes, 5)[-1].values()))
        manager.close()
    assert moved[0] <= 0.7 * moved[1]
