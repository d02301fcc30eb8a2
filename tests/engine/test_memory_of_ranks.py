"""What a rank holds at most is its N-th of what the stage shards, and all of the rest.

Bytes are those of the books, per weight, in bf16; memory is unlimited, so nothing else bounds them.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import patrickstar
from patrickstar.comm import Communicator
from tests.engine.data_parallel import EqualLayers
from tests.rank_pool import RankPool

WIDTH, LAYERS = 128, 64  # shards of whole pages, and a chunk for each layer
KEPT = {1: (2, 14), 2: (2, 14), 3: (0, 16)}  # bytes per weight: replicated, sharded
# Bytes per weight of eleven chunks in bf16: those in use, kept and on their way, or waiting for it.
WHOLE = 11 * 2 / LAYERS


def peaks(rank: int, size: int, stage: int) -> tuple[float, float]:
    """The most bytes per weight in the books, while the model was built and while it trained."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "patrickstar": {"chunk_size": WIDTH * WIDTH},
    }
    with Communicator.open(timeout=60) if size > 1 else nullcontext() as comm:
        engine, optimizer = patrickstar.initialize_engine(
            lambda: EqualLayers(WIDTH, LAYERS), config, communicator=comm
        )
        built = engine.memory_report().tiers["host"].peak
        engine.reset_peak()
        for _ in range(3):
            engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)))
            optimizer.step()
            optimizer.zero_grad()
        trained = engine.memory_report().tiers["host"].peak
        weights = sum(p.numel() for p in engine.parameters())
        engine.close()
    return built / weights, trained / weights


@pytest.mark.parametrize(("size", "stage"), [(1, 3), (2, 1), (4, 2), (2, 3), (4, 3)])
def test_a_rank_holds_its_nth_of_what_the_stage_shards_and_a_few_whole_chunks(
    ranks: RankPool, size: int, stage: int
) -> None:
    replicated, sharded = KEPT[stage]
    theory = replicated + sharded / size
    for built, trained in ranks.run(peaks, size, stage):
        assert theory <= trained <= theory + WHOLE
        if stage == 3 and size > 1:  # drawn in 4 bytes per weight, which are shared at once
            assert built <= (4 + 2 + 4) / size + WHOLE
