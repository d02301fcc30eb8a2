"""Many small chunks in one collective."""

from __future__ import annotations

import pytest
import torch

from patrickstar.comm import Collective, Communicator, Part, ShardedComm
from patrickstar.comm.coalesced import names
from tests.comm.test_sharded import contribution

NUMELS = [5, 1, 12, 0, 7, 30]


def pack(rank: int, size: int, dtype: torch.dtype, bucket: int) -> dict[str, object]:
    with Communicator.open(timeout=20, segment_numel=8) as comm:
        chunks = ShardedComm(comm, bucket_bytes=bucket)
        single = [contribution(rank, numel, dtype) for numel in NUMELS]
        packed = [buffer.clone() for buffer in single]
        owns, packed_owns = [], []
        for buffer in single:
            start, stop = chunks.layout("c", buffer.numel()).range(rank)
            owns.append(torch.empty(stop - start))
            packed_owns.append(torch.empty(stop - start))
        for buffer, own in zip(single, owns, strict=True):
            chunks.reduce_scatter("c", buffer, own, op="avg", predivide=2.0).wait()
        comm.counters.reset()
        parts = [Part(f"c{i}", packed[i], packed_owns[i]) for i in range(len(NUMELS))]
        chunks.reduce_scatter_many(parts, op="avg", predivide=2.0).wait()
        reductions = comm.counters[Collective.REDUCE_SCATTER]
        for buffer, own in zip(single, owns, strict=True):
            chunks.all_gather("c", buffer, own).wait()
        comm.counters.reset()
        chunks.all_gather_many(parts).wait()
        return {
            "single": single,
            "packed": packed,
            "calls": (reductions.calls, comm.counters[Collective.ALL_GATHER].calls),
            "payload": reductions.payload_bytes,
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3])
def test_packed_collectives_give_the_bits_of_separate_ones_in_one_call(ranks, size, dtype):
    for answer in ranks.run(pack, size, dtype, 1 << 20):
        for one, other in zip(answer["single"], answer["packed"], strict=True):
            assert torch.equal(one, other)
        assert answer["calls"] == (1, 1)
        assert answer["payload"] == sum(NUMELS) * dtype.itemsize


def test_a_limit_cuts_the_list_into_several_calls(ranks):
    for answer in ranks.run(pack, 2, torch.float32, 40):
        for one, other in zip(answer["single"], answer["packed"], strict=True):
            assert torch.equal(one, other)
        # 5+1 | 12 | 0+7 | 30 elements of 4 bytes, at most 40 bytes together
        assert answer["calls"] == (4, 4)


def mix(rank: int, size: int) -> tuple[list[float], list[float], int]:
    with Communicator.open(timeout=20) as comm:
        wide, narrow = torch.full((4,), 1.0), torch.full((4,), 2.0, dtype=torch.bfloat16)
        work = ShardedComm(comm).reduce_scatter_many([Part("w", wide), Part("n", narrow)])
        work.wait(timeout=10)
        assert work.done()
        calls = comm.counters[Collective.REDUCE_SCATTER].calls
        return wide[2 * rank : 2 * rank + 2].tolist(), narrow[2 * rank :][:2].tolist(), calls


def test_dtypes_are_not_packed_together(ranks):
    assert ranks.run(mix, 2) == [([2.0, 2.0], [4.0, 4.0], 2)] * 2


def test_a_bucket_is_named_by_its_first_chunks():
    assert names(["a", "b"]) == "a + b"
    assert names(["a", "b", "c", "d", "e"]) == "a + b + c + 2 more"
