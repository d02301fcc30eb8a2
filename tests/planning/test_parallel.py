"""The paper model of data parallel runs."""

from __future__ import annotations

import functools
import time

import pytest
import torch

from patrickstar import planning
from patrickstar.models import GPT, preset
from patrickstar.planning import DataParallel


@functools.cache
def on(ranks: int) -> DataParallel:
    tokens = torch.zeros(1, 64, dtype=torch.long, device="meta")
    found = planning.plan(
        lambda: GPT(preset("gpt-tiny")),
        {"bf16": {"enabled": True}},
        tokens,
        tokens,
        machine="server-8x80gb",
        world_size=ranks,
        what_if=False,
    )
    assert found.parallel is not None
    return found.parallel


WEIGHTS = sum(p.numel() for p in GPT(preset("gpt-tiny")).parameters())


@pytest.mark.parametrize("ranks", [8, 4096])
def test_stages_move_two_two_two_and_three_times_the_weights(ranks: int) -> None:
    moved = [stage.volume_bytes for stage in on(ranks).stages]
    share = 2 * WEIGHTS * (ranks - 1) / ranks  # bf16
    assert moved == pytest.approx([2 * share, 2 * share, 2 * share, 3 * share], rel=1e-3)


def test_what_is_sharded_takes_an_nth() -> None:
    none, optimizer, gradients, everything = on(4096).stages
    assert none.state_bytes == 16 * WEIGHTS
    assert optimizer.state_bytes == pytest.approx(4 * WEIGHTS + 12 * WEIGHTS / 4096, abs=2)
    assert gradients.state_bytes == pytest.approx(2 * WEIGHTS + 14 * WEIGHTS / 4096, abs=3)
    assert everything.state_bytes == pytest.approx(16 * WEIGHTS / 4096, abs=4)


def test_only_an_eighth_crosses_nodes_and_nothing_on_one() -> None:
    assert on(8).stages[0].across_bytes == 0
    across, inside = on(4096).stages[0].across_bytes, on(4096).stages[0].inside_bytes
    assert across == pytest.approx(inside / 7, rel=0.01)


def test_thousands_of_ranks_take_no_longer_to_plan() -> None:
    began = time.process_time()
    found = planning.plan(
        lambda: torch.nn.Linear(8, 8),
        {},
        torch.zeros(2, 8, device="meta"),
        machine="server-8x80gb",
        world_size=16384,
        what_if=False,
    )
    assert found.parallel is not None
    assert found.parallel.nodes == 2048
    assert time.process_time() - began < 5


def test_more_ranks_never_take_less_time_for_the_links() -> None:
    seconds = [on(ranks).stages[3].communication_s or 0 for ranks in (8, 16, 4096)]
    assert 0 < seconds[0] < seconds[1] < seconds[2]
