"""Sparse gradients of an embedding become dense in their chunk."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.engine.training import run_engine, settings

ROWS, WIDTH, CHUNK, BUDGET = 100, 32, 2048, 1 << 17


class Lookup(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)).square().mean()


def test_a_sparse_embedding_trains_to_the_bits_of_a_dense_one(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    batches = [{"ids": torch.randint(0, ROWS, (2, 5), generator=draw)} for _ in range(4)]
    for budget in (None, BUDGET):
        how = settings(host=budget, disk=tmp_path, chunk=CHUNK)
        dense = run_engine(lambda: Lookup(sparse=False), batches, how)
        dense.assert_same(run_engine(lambda: Lookup(sparse=True), batches, how))
