"""Models that tensor parallelism of torch's has split."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import patrickstar
from patrickstar.comm import Communicator
from patrickstar.errors import ConfigError
from patrickstar.optim import ChunkedAdamW
from tests.rank_pool import RankPool

WIDTH, ROWS, STEPS = 16, 8, 5
HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x)))).tanh().sum(dim=1).square().mean()


def build() -> nn.Module:
    torch.manual_seed(0)
    return Block()


def split(mesh: Any) -> nn.Module:
    return parallelize_module(
        build(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> list[float]:
    """Of the rows of one of `size` data-parallel ranks."""
    found = []
    for step in range(STEPS):
        loss = model(batch(step).chunk(size)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def on_a_grid(rank: int, size: int, chunked: bool) -> list[float]:
    """Two by two ranks: tensor parallelism, and data parallelism of FSDP2 over it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = fully_shard(split(mesh), mesh=mesh["data"])
    if chunked:
        optimizer: torch.optim.Optimizer = ChunkedAdamW(
            model.parameters(), **HYPER, memory={"host": "1MiB"}, chunk_size=512
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
    place = mesh.get_local_rank("data")
    mean = torch.tensor(losses(model, optimizer, place, 2), dtype=torch.float64)
    dist.all_reduce(mean)
    return [value / size for value in mean.tolist()]


def alone(rank: int, size: int) -> list[float]:
    model = build()
    return losses(model, torch.optim.AdamW(model.parameters(), fused=True, **HYPER), 0, 1)


def test_chunked_states_train_what_is_split_over_two_by_two_ranks(ranks: RankPool) -> None:
    found, torchs = ranks.run(on_a_grid, 4, True)[0], ranks.run(on_a_grid, 4, False)[0]
    assert found == torchs
    torch.testing.assert_close(found, ranks.run(alone, 1)[0], rtol=1e-5, atol=0)


def hand_over(rank: int, size: int) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    with Communicator.from_mesh(mesh, shard="data") as comm:
        try:
            patrickstar.initialize_engine(lambda: split(mesh), config, communicator=comm)
        except ConfigError as error:
            return str(error)
    return ""


def test_the_engine_refuses_what_is_split_and_names_what_works(ranks: RankPool) -> None:
    for message in ranks.run(hand_over, 2):
        assert "'up.weight' is a DTensor" in message
        assert "ChunkedAdamW" in message
