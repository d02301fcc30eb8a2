"""Models that tensor parallelism of torch's has split."""

from __future__ import annotations

from typing import Any

import pytest
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


class SumBackward(torch.autograd.Function):
    """The input of layers that are split: each has a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        whole = grads[0].clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class SumForward(torch.autograd.Function):
    """The output of layers that are split: each has a part of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        whole = x.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class HalfOfABlock(Block):
    """A block whose hidden features are split over the ranks of `group`, by hand."""

    def __init__(self, group: Any, part: int, parts: int) -> None:
        super().__init__()
        self.group = group
        whole = {name: weight.detach().clone() for name, weight in self.named_parameters()}
        self.up = nn.Linear(WIDTH, 4 * WIDTH // parts)
        self.down = nn.Linear(4 * WIDTH // parts, WIDTH, bias=False)
        self.down_bias = nn.Parameter(whole["down.bias"])
        with torch.no_grad():
            self.up.weight.copy_(whole["up.weight"].chunk(parts)[part])
            self.up.bias.copy_(whole["up.bias"].chunk(parts)[part])
            self.down.weight.copy_(whole["down.weight"].chunk(parts, dim=1)[part])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(SumBackward.apply(x, self.group)))
        total = SumForward.apply(self.down(hidden), self.group) + self.down_bias
        return self.norm(x + total).tanh().sum(dim=1).square().mean()


def split_by_hand(rank: int, size: int, stage: int, more: dict[str, Any]) -> list[float]:
    """Two by two ranks: a block split by hand, and data parallelism of ours over it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    part, place = mesh.get_local_rank("tensor"), mesh.get_local_rank("data")
    config = {
        "train_batch_size": ROWS,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "zero_optimization": {"stage": stage},
        "patrickstar": {"chunk_size": 256},
        **more,
    }

    def provide() -> nn.Module:
        torch.manual_seed(0)
        return HalfOfABlock(mesh.get_group("tensor"), part, 2)

    with Communicator.from_mesh(mesh, shard="data") as comm:
        engine, optimizer = patrickstar.initialize_engine(provide, config, communicator=comm)
        found = []
        for step in range(STEPS):
            loss = engine(batch(step).chunk(2)[place])
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(engine.mean_over_ranks(float(loss.detach())))
        engine.close()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_group_of_a_mesh_trains_what_is_split_over_its_other_dimension(
    ranks: RankPool, stage: int
) -> None:
    expected = ranks.run(alone, 1)[0]
    for found in ranks.run(split_by_hand, 4, stage, {"gradient_clipping": 0.0}):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def clipped_by_default(rank: int, size: int) -> str:
    try:
        split_by_hand(rank, size, 3, {})
    except ConfigError as error:
        return str(error)
    return ""


def test_clipping_by_the_norm_of_a_part_has_to_be_asked_for(ranks: RankPool) -> None:
    for message in ranks.run(clipped_by_default, 4):
        assert "2 of 4 ranks" in message
        assert "set gradient_clipping to 0" in message


def by_torch(
    rank: int, size: int, data: int, stage: int | None, clipping: float
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms, and parts of weights of a block that `parallelize_module` has split.

    Args:
        data: ranks that hold the same part.
        stage: of ours; None for a plain loop with torch's optimizer, where `data` is 1.
    """
    mesh = init_device_mesh("cpu", (data, size // data), mesh_dim_names=("data", "tensor"))
    if stage is None:
        model = split(mesh)
        groups = [{"params": [p]} for p in model.parameters()]  # DTensors and tensors do not mix
        optimizer = torch.optim.AdamW(groups, fused=True, **HYPER)
        found = losses(model, optimizer, 0, 1)
        return found, [], {name: part_of(p).clone() for name, p in model.named_parameters()}
    config = {
        "train_batch_size": ROWS,
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "zero_optimization": {"stage": stage},
        "patrickstar": {"chunk_size": 256},
    }
    place, found, norms = mesh.get_local_rank("data"), [], []
    with Communicator.from_mesh(mesh, shard="data") as comm:
        engine, ours = patrickstar.initialize_engine(lambda: split(mesh), config, communicator=comm)
        for step in range(STEPS):
            loss = engine(batch(step).chunk(data)[place])
            engine.backward(loss)
            ours.step()
            ours.zero_grad()
            found.append(engine.mean_over_ranks(float(loss.detach())))
            norms.append(engine.get_global_grad_norm() or 0.0)
        weights = engine.state_dict()
        engine.close()
    return found, norms, weights


def part_of(parameter: torch.Tensor) -> torch.Tensor:
    return getattr(parameter, "_local_tensor", parameter).detach()


def clipped_alone(rank: int, size: int, clipping: float) -> tuple[list[float], list[float]]:
    model, norms = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)

    def clip(*_: Any) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clipping)))

    optimizer.register_step_pre_hook(clip)
    return losses(model, optimizer, 0, 1), norms


def test_what_torch_has_split_trains_to_the_same_bits_as_in_a_plain_loop(ranks: RankPool) -> None:
    plain = ranks.run(by_torch, 2, 1, None, 0.0)
    for stage in (0, 1):
        ours = ranks.run(by_torch, 2, 1, stage, 0.0)
        for (found, _, weights), (expected, _, theirs) in zip(ours, plain, strict=True):
            assert found == expected
            assert weights.keys() == theirs.keys()
            assert all(torch.equal(weights[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("stage", [1, 3])
def test_norms_and_clipping_are_of_the_whole_of_what_is_split(ranks: RankPool, stage: int) -> None:
    expected, norms = ranks.run(clipped_alone, 1, 0.05)[0]
    assert min(norms) > 0.05
    for found, there, _ in ranks.run(by_torch, 4, 2, stage, 0.05):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(there, norms, rtol=1e-4, atol=0)


def hand_over(rank: int, size: int, fsdp: bool) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))

    def provide() -> nn.Module:
        return fully_shard(build(), mesh=mesh["tensor"]) if fsdp else split(mesh)

    config = {
        "train_batch_size": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": HYPER},
    }
    over = "data" if fsdp else "tensor"
    with Communicator.from_mesh(mesh, shard=over) as comm:
        try:
            patrickstar.initialize_engine(provide, config, communicator=comm)
        except ConfigError as error:
            return str(error)
    return ""


def test_parts_that_would_be_taken_for_copies_are_refused(ranks: RankPool) -> None:
    for message in ranks.run(hand_over, 2, False):
        assert "'up.weight' is a DTensor" in message
        assert "shard='data'" in message


def test_what_fsdp2_manages_is_refused_with_what_works(ranks: RankPool) -> None:
    for message in ranks.run(hand_over, 2, True):
        assert "fully_shard" in message
        assert "ChunkedAdamW" in message
