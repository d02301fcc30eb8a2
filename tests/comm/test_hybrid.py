"""Sharding inside a node, replicas across nodes: 2 x 2."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from patrickstar.comm import Communicator, CommValueError, OwnerComm, Part, ShardedComm
from patrickstar.comm.groups import mesh_topology
from tests.comm.test_sharded import contribution

NUMEL = 29


def expected_sum(dtype: torch.dtype) -> torch.Tensor:
    """Inside copies first, then across, in float32."""
    parts = [contribution(rank, NUMEL, dtype).float() for rank in range(4)]
    return (parts[0] + parts[1]) + (parts[2] + parts[3])


def work_in_a_grid(rank: int, size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    with Communicator.open(shard_size=2, timeout=20, segment_numel=7) as comm:
        chunks = ShardedComm(comm)
        owned = OwnerComm(comm, {"c": 1})
        start, stop = chunks.layout("c", NUMEL).range(comm.shard.rank)
        own = torch.empty(stop - start)
        chunks.reduce_scatter("c", contribution(rank, NUMEL, dtype), own).wait()
        full = torch.empty(NUMEL)
        chunks.all_gather("c", full, own).wait()
        everywhere = contribution(rank, NUMEL, dtype).float()
        chunks.all_reduce("c", everywhere, op="avg", dtype=dtype).wait()
        by_owner = contribution(rank, NUMEL, dtype).float()
        owned.reduce_scatter("c", by_owner).wait()
        owned.all_gather("c", by_owner).wait()
        packed = [contribution(rank, NUMEL, dtype).float(), torch.full((3,), float(rank))]
        chunks.reduce_scatter_many([Part("c", packed[0]), Part("d", packed[1])]).wait()
        chunks.all_gather_many([Part("c", packed[0]), Part("d", packed[1])]).wait()
        sent = torch.full((5,), float(rank))
        chunks.broadcast("c", sent, src=2).wait()
        return {
            "full": full,
            "average": everywhere,
            "owner": by_owner,
            "packed": packed[0],
            "packed too": packed[1],
            "broadcast": sent,
            "norm": torch.tensor(comm.shard_reductions.sum([float(own.double().square().sum())])),
        }


def test_a_grid_reduces_inside_and_across_and_gathers_inside(ranks):
    answers = ranks.run(work_in_a_grid, 4, torch.float32)
    total = expected_sum(torch.float32)
    for answer in answers:
        for name in ("full", "owner", "packed"):
            assert torch.equal(answer[name], total), name
        assert torch.equal(answer["average"], total / 4)
        assert answer["packed too"].tolist() == [6.0] * 3
        assert answer["broadcast"].tolist() == [2.0] * 5
        # Over the copy, not over all ranks: those would count every shard twice.
        assert answer["norm"].item() == pytest.approx(float(total.double().square().sum()))


def test_bfloat16_in_a_grid_is_the_same_on_all_ranks_and_within_rounding(ranks):
    answers = ranks.run(work_in_a_grid, 4, torch.bfloat16)
    total = expected_sum(torch.bfloat16)
    for answer in answers:
        assert torch.allclose(answer["full"], total, atol=0.05)
        assert torch.allclose(answer["average"], total / 4, atol=0.05)
        for name, value in answer.items():
            assert torch.equal(value, answers[0][name]), f"ranks differ in {name}"


def read_meshes(rank: int, size: int) -> tuple[object, ...]:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    tensor_parallel = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (4,))
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    with pytest.raises(CommValueError, match="no dimension 'sahrd'"):
        mesh_topology(grid, shard="sahrd")
    with pytest.raises(CommValueError, match="shard over"):
        mesh_topology(grid, replicate="shard")
    with Communicator.from_mesh(tensor_parallel, shard="dp", timeout=20) as comm:
        full = torch.empty(2)
        ShardedComm(comm).all_gather("c", full, torch.tensor([float(rank)])).wait()
    with Communicator.from_mesh(grid, timeout=20) as comm:
        summed = torch.tensor([float(rank)])
        ShardedComm(comm).all_reduce("c", summed).wait()
    return (
        mesh_topology(grid).rows,
        mesh_topology(grid, shard="shard", replicate="replicate").rows,
        mesh_topology(grid, shard="replicate", replicate="shard").rows,
        mesh_topology(tensor_parallel, shard="dp").rows,
        mesh_topology(flat).rows,
        mesh_topology(three, shard="dp").rows,
        full.tolist(),
        summed.item(),
    )


def test_a_device_mesh_names_the_grid_and_other_dimensions_are_held_fixed(ranks):
    for rank, answer in enumerate(ranks.run(read_meshes, 4)):
        assert answer[0] == answer[1] == ((0, 1), (2, 3))
        assert answer[2] == ((0, 2), (1, 3))
        assert answer[3] == (((0, 2),) if rank % 2 == 0 else ((1, 3),))
        assert answer[4] == ((0, 1, 2, 3),)
        assert answer[5] == answer[3]
        assert answer[6] == [float(rank % 2), float(rank % 2 + 2)]
        assert answer[7] == 6.0


def use_two_at_once(rank: int, size: int) -> list[float]:
    with Communicator.open(timeout=20) as everyone, Communicator.open(shard_size=2) as pairs:
        works, buffers = [], []
        for _ in range(10):
            buffers += [torch.full((5000,), float(rank)), torch.full((5000,), float(rank))]
            works.append(ShardedComm(everyone).all_reduce("c", buffers[-2]))
            works.append(ShardedComm(pairs).all_gather("c", buffers[-1]))
        for work in reversed(works):
            work.wait()
        return [buffer.sum().item() for buffer in buffers]


def test_two_communicators_of_one_rank_do_not_disturb_each_other(ranks):
    for rank, sums in enumerate(ranks.run(use_two_at_once, 4)):
        gathered = 2500.0 * (rank // 2 * 4 + 1)
        assert sums == [5000.0 * 6, gathered] * 10
