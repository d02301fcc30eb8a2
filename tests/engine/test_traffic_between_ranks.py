"""What a step sends between ranks, counted, is what theory says of a stage."""

from __future__ import annotations

import pytest
import torch

import patrickstar
from patrickstar.comm import Communicator
from patrickstar.engine.engine import Engine
from patrickstar.engine.optimizer import ChunkedOptimizer
from tests.engine.data_parallel import Case, EqualLayers, train
from tests.rank_pool import RankPool

WIDTH, LAYERS = 48, 104  # what a layer has is divided by 64 and 96, so nothing is padded
IN_P = {0: 2, 1: 2, 2: 2, 3: 3}  # bytes sent per byte of parameters, but for (N-1)/N


def sent(rank: int, size: int, stage: int) -> float:
    """Bytes that this rank handed to the network in the third step, in those of the parameters."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "patrickstar": {"chunk_size": WIDTH * WIDTH},
    }
    with Communicator.open(timeout=60) as comm:
        engine, optimizer = patrickstar.initialize_engine(
            lambda: EqualLayers(WIDTH, LAYERS), config, communicator=comm
        )
        before = now = 0
        for _ in range(3):
            before = sum(totals.sent_bytes for totals in comm.counters.snapshot().values())
            engine.backward(engine(torch.ones(2, WIDTH)))
            optimizer.step()
            comm.drain()
            now = sum(totals.sent_bytes for totals in comm.counters.snapshot().values())
        parameters = sum(p.numel() * p.element_size() for p in engine.parameters())
        engine.close()
    return (now - before) / parameters


@pytest.mark.parametrize(("size", "stage"), [(2, 0), (2, 1), (3, 2), (2, 3), (3, 3)])
def test_a_step_sends_what_theory_says(ranks: RankPool, size: int, stage: int) -> None:
    for found in ranks.run(sent, size, stage):
        assert found == pytest.approx(IN_P[stage] * (size - 1) / size, rel=0.02)


def gathered(rank: int, size: int, checkpointing: str | None) -> list[float]:
    """Bytes gathered in each step at stage 3, in those of the parameters."""
    found: list[float] = []
    totals = [0]

    def count(engine: Engine, optimizer: ChunkedOptimizer, step: int) -> None:
        assert engine.ranks is not None
        totals.append(engine.ranks.comm.counters.snapshot()["all-gather"].payload_bytes)
        parameters = sum(p.numel() * p.element_size() for p in engine.parameters())
        found.append((totals[-1] - totals[-2]) / parameters)

    train(rank, size, Case(3, steps=3, checkpointing=checkpointing), count)
    return found[1:]


@pytest.mark.parametrize("checkpointing", [None, "reentrant"])
def test_tied_weights_and_recomputed_blocks_are_gathered_once_in_each_pass(
    ranks: RankPool, checkpointing: str | None
) -> None:
    for found in ranks.run(gathered, 2, checkpointing):
        assert all(times <= 2.02 for times in found), found
