"""Sharded chunks: gathered when they are used, ahead of it where that is foreseen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import patrickstar
from patrickstar.comm import Communicator, ShardedComm
from patrickstar.engine.initialize import make_engine
from patrickstar.engine.ranks import Ranks
from patrickstar.errors import BudgetError
from tests.engine.training import settings
from tests.rank_pool import RankPool

WIDTH, LAYERS, MIB = 64, 6, 1 << 20


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def train(rank: int, size: int, memory: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train at stage 3; what was gathered ahead and when, and how far it got."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "patrickstar": {"chunk_size": WIDTH * WIDTH + WIDTH, "memory": memory},
    }
    found: dict[str, Any] = {"losses": [], "ahead": [], "calls": [], "refused": None}
    draw = torch.Generator().manual_seed(rank)
    with Communicator.open(timeout=20) as comm:
        try:
            engine, optimizer = patrickstar.initialize_engine(Deep, config, communicator=comm)
        except BudgetError:
            return found | {"refused": 0}
        sharding: Any = engine.module.layers[0].weight._home.sharding
        begun: list[int] = []
        built = comm.counters.snapshot()["all-gather"].calls
        launch = sharding._launch

        def noted(halves: Any) -> None:
            begun.append(halves.full.id)
            launch(halves)

        sharding._launch = noted
        try:
            for step in range(steps):  # noqa: B007
                begun.clear()
                loss = engine(torch.randn(2, WIDTH, generator=draw))
                engine.backward(loss)
                optimizer.step()
                found["losses"].append(comm.reductions.sum([loss.item()])[0])
                found["ahead"].append(len(begun))
                calls = comm.counters.snapshot()["all-gather"].calls
                found["calls"].append(calls - built)
                built = calls
        except BudgetError:
            found["refused"] = step
        engine.close()
    return found


def test_what_is_asked_for_next_is_gathered_ahead_from_the_second_step_on(ranks: RankPool) -> None:
    for found in ranks.run(train, 2, {}, 3):
        # Every layer in the forward; in the backward neither those that stayed nor the first one,
        # since nobody wants a gradient of its input. Two stay at first, and four with room.
        assert found["calls"] == [2 * LAYERS - 3, 2 * LAYERS - 5, 2 * LAYERS - 5]
        # All but the first of them come ahead.
        assert found["ahead"] == [0, 2 * LAYERS - 6, 2 * LAYERS - 6]


def test_gathering_ahead_needs_no_more_than_the_first_step_was_granted(
    ranks: RankPool, tmp_path: Path
) -> None:
    unlimited = ranks.run(train, 2, {}, 4)[0]["losses"]
    answers = set()
    for kib in range(50, 131, 8):
        memory = {"host": 2 * kib << 10, "disk": {"path": str(tmp_path)}}
        found = ranks.run(train, 2, memory, 4)[0]
        assert found["refused"] in (None, 0), kib
        assert found["losses"] == ([] if found["refused"] == 0 else unlimited)
        answers.add(found["refused"])
    assert answers == {None, 0}


def mostly_frozen() -> nn.Module:
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(40)))
    module[1:].requires_grad_(False)  # type: ignore[index]
    return module


def build_for_an_accelerator(rank: int, size: int) -> int:
    """The bytes of the weights; the CPU stands for the accelerator."""
    how = settings(device=MIB, host=MIB, chunk=4096, accelerator=True)
    with Communicator.open(timeout=60.0) as comm:
        engine, _ = make_engine(
            mostly_frozen, replace(how, ranks=Ranks(comm, ShardedComm(comm), 3))
        )
        weights = sum(p.nbytes for p in engine.parameters())
        engine.close()
    return weights


def test_what_is_built_for_an_accelerator_is_shared_from_the_beginning(ranks: RankPool) -> None:
    """It is built in half of the host's budget, which the full model is larger than."""
    assert min(ranks.run(build_for_an_accelerator, 2)) > MIB // 2
