"""OwnerComm on real groups, and that it gives the bits of ShardedComm."""

from __future__ import annotations

import pytest
import torch

from patrickstar.comm import (
    Collective,
    Communicator,
    CommValueError,
    OwnerComm,
    Part,
    ShardedComm,
    Work,
)
from patrickstar.comm.transport import allocate_empty
from tests.comm.test_sharded import contribution, plain_sum

NUMEL, SEGMENT = 101, 16


def by_owner(rank: int, size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    with Communicator.open(timeout=20, segment_numel=SEGMENT) as comm:
        chunks, sharded = OwnerComm(comm, {"a": size - 1, "b": 0}), ShardedComm(comm)
        sent = torch.full((NUMEL,), float(rank))
        chunks.all_gather("a", sent).wait()
        summed = contribution(rank, NUMEL, dtype)
        chunks.reduce_scatter("a", summed, op="avg").wait()
        untouched = torch.equal(summed, contribution(rank, NUMEL, dtype))
        chunks.all_gather("a", summed).wait()
        own = torch.zeros(NUMEL if rank == 0 else 0, dtype=torch.float64)
        chunks.reduce_scatter("b", contribution(rank, NUMEL, dtype), own, op="avg").wait()
        other = contribution(rank, NUMEL, dtype)
        sharded.reduce_scatter("c", other, op="avg").wait()
        sharded.all_gather("c", other).wait()
        return {
            "sent": sent,
            "summed": summed,
            "own": own,
            "sharded": other,
            "untouched": torch.tensor(untouched),
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_owners_broadcast_and_reduce_with_the_bits_of_the_collective_mode(ranks, size, dtype):
    answers = ranks.run(by_owner, size, dtype)
    mean = plain_sum(size, NUMEL, dtype) / size
    for rank, answer in enumerate(answers):
        assert answer["sent"].unique().tolist() == [size - 1.0]
        assert torch.equal(answer["summed"], mean.to(dtype))
        assert torch.equal(answer["summed"], answer["sharded"])
        assert torch.equal(answer["own"], (mean if rank == 0 else mean[:0]).double())
        assert bool(answer["untouched"]) == (rank != size - 1 or size == 1)


def measure_scratch(rank: int, size: int, numel: int) -> dict[str, int]:
    taken = 0

    def allocate(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nonlocal taken
        taken += count * dtype.itemsize
        return allocate_empty(count, dtype, device)

    scratch = {}
    for mode in ("owner gather", "owner reduce", "sharded gather", "sharded reduce", "packed"):
        with Communicator.open(timeout=20, segment_numel=SEGMENT, allocate=allocate) as comm:
            taken = 0
            for _ in range(3):
                use(comm, mode, numel).wait()
            scratch[mode] = taken
    return scratch


def use(comm: Communicator, mode: str, numel: int) -> Work:
    owned, sharded = OwnerComm(comm, {"c": 0}), ShardedComm(comm)
    full, own = torch.zeros(numel), torch.zeros(numel if comm.rank == 0 else 0)
    if mode == "owner gather":
        return owned.all_gather("c", full, own)
    if mode == "owner reduce":
        return owned.reduce_scatter("c", full, own)
    if mode == "sharded gather":
        return sharded.all_gather("c", full)
    if mode == "sharded reduce":
        start, stop = sharded.layout("c", numel).range(comm.rank)
        return sharded.reduce_scatter("c", full, torch.zeros(stop - start))
    return sharded.all_gather_many([Part("c", full), Part("d", torch.zeros(numel))])


@pytest.mark.parametrize("numel", [4 * 32, 4 * 1024])
def test_scratch_memory_is_the_closed_formula_however_long_the_chunk(ranks, numel):
    size, segment = 4, SEGMENT * 4
    for rank, scratch in enumerate(ranks.run(measure_scratch, size, numel)):
        assert scratch["owner gather"] == scratch["sharded gather"] == 0
        receiving = 2 * (size - 1) * segment
        assert scratch["owner reduce"] == (receiving if rank == 0 else 0)
        assert scratch["sharded reduce"] == receiving
        assert scratch["packed"] == 3 * 2 * numel * 4  # one packed buffer per call


def many(rank: int, size: int) -> tuple[list[list[float]], int]:
    with Communicator.open(timeout=20) as comm:
        chunks = OwnerComm(comm, {"a": 0, "b": 1, "c": 0})
        parts = [Part(chunk, torch.full((3,), float(rank + 1))) for chunk in "abc"]
        work = chunks.reduce_scatter_many(parts, op="avg")
        work.wait()
        assert work.done()
        chunks.all_gather_many(parts).wait(timeout=10)
        return [part.full.tolist() for part in parts], comm.counters[Collective.ALL_GATHER].calls


def test_many_chunks_travel_one_at_a_time(ranks):
    assert ranks.run(many, 2) == [([[1.5] * 3] * 3, 3)] * 2


def ask_for_a_stranger(rank: int, size: int) -> str:
    with Communicator.open(timeout=20) as comm:
        with pytest.raises(CommValueError) as refused:
            OwnerComm(comm, {"a": 0}).all_gather("b", torch.zeros(2))
        with pytest.raises(CommValueError, match="rank 2"):
            OwnerComm(comm, {"a": 2})
    return str(refused.value)


def test_a_chunk_without_an_owner_is_named(ranks):
    assert "'b' has no owner" in ranks.run(ask_for_a_stranger, 2)[0]
