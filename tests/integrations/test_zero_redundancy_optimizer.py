"""`ChunkedAdamW` as the local optimizer of torch's ZeroRedundancyOptimizer, under DDP."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from patrickstar.optim import ChunkedAdamW
from tests.integrations.foreign_run import HYPER, batch, build
from tests.rank_pool import RankPool

STEPS, SAVED_AFTER, BUDGET = 6, 3, 20_000


def sharded(module: nn.Module, name: str, folder: str, views: bool) -> ZeroRedundancyOptimizer:
    kind: Any = torch.optim.AdamW
    options: dict[str, Any] = {"fused": True}
    if name == "chunked":
        kind = ChunkedAdamW
        options = {"memory": {"host": BUDGET, "disk": folder}, "chunk_size": 256}
    return ZeroRedundancyOptimizer(
        module.parameters(), kind, parameters_as_bucket_view=views, **HYPER, **options
    )


def train(
    rank: int, size: int, name: str, views: bool, resume: bool
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights; a rate lowered through the wrapper; perhaps saved and loaded."""
    module = build()
    run = nn.parallel.DistributedDataParallel(module)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        optimizer = sharded(module, name, folder, views)
        for step in range(STEPS):
            if resume and step == SAVED_AFTER:
                optimizer.consolidate_state_dict(0)
                saved = [optimizer.state_dict() if rank == 0 else None]
                dist.broadcast_object_list(saved, 0)
                optimizer.optim.close()
                optimizer = sharded(module, name, folder, views)
                optimizer.load_state_dict(saved[0])
                optimizer.state.clear()  # the wrapper's copy, which nobody reads
            loss = run(batch(step, rank)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            losses.append(loss.item())
        if name == "chunked":
            report = optimizer.optim.memory_report()
            assert report.tiers["host"].peak <= BUDGET and report.moved["disk->host"] > 0
            optimizer.optim.close()
    return losses, [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("views", [False, True], ids=["tensors", "views of buckets"])
@pytest.mark.parametrize("resume", [False, True], ids=["through", "resumed"])
def test_each_rank_updates_its_shard_as_fused_adamw_does(
    views: bool, resume: bool, ranks: RankPool
) -> None:
    theirs = ranks.run(train, 2, "torch", views, False)
    for (losses, weights), (expected, others) in zip(
        ranks.run(train, 2, "chunked", views, resume), theirs, strict=True
    ):
        assert losses == expected
        assert all(map(torch.equal, weights, others))
