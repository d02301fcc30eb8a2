"""ShardedComm on real groups: results, bits, uneven sizes, dtypes, in place, errors."""

from __future__ import annotations

import pytest
import torch

from patrickstar.comm import Communicator, CommValueError, ShardedComm

SIZES = [1, 2, 3, 4]
# Divisible, uneven, fewer elements than ranks, nothing, and several segments of 7.
NUMELS = [12, 13, 2, 0, 101]


def contribution(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def plain_sum(size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum in rank order, in float32."""
    total = contribution(0, numel, dtype).float()
    for rank in range(1, size):
        total = total + contribution(rank, numel, dtype).float()
    return total


def open_small(size: int, **options: object) -> Communicator:
    return Communicator.open(timeout=20, segment_numel=7, **options)


def gather_everywhere(rank: int, size: int) -> list[torch.Tensor]:
    with open_small(size) as comm:
        chunks = ShardedComm(comm)
        results = []
        for numel in NUMELS:
            start, stop = chunks.layout("c", numel).range(rank)
            full = torch.full((numel,), -1.0)
            chunks.all_gather("c", full, torch.arange(start, stop) * 1.5).wait()
            results.append(full)
        return results


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_puts_every_shard_in_its_place_for_uneven_sizes_too(ranks, size):
    for results in ranks.run(gather_everywhere, size):
        for numel, full in zip(NUMELS, results, strict=True):
            assert torch.equal(full, torch.arange(numel) * 1.5)


def gather_in_place(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    with open_small(size) as comm:
        chunks = ShardedComm(comm)
        full = torch.full((13,), -1.0)
        start, stop = chunks.layout("c", 13).range(rank)
        full[start:stop] = rank
        chunks.all_gather("c", full).wait()
        padded = torch.zeros(-(-13 // size) * size)
        chunks.all_gather("c", padded, torch.full((padded.numel() // size,), float(rank))).wait()
        return full, padded


def test_all_gather_works_in_place_and_on_padded_buffers(ranks):
    for full, padded in ranks.run(gather_in_place, 4):
        assert full.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4 + [3.0]
        assert padded.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4 + [3.0] * 4


def gather_in_another_dtype(rank: int, size: int) -> torch.Tensor:
    with open_small(size) as comm:
        full = torch.empty(10, dtype=torch.bfloat16)
        start, stop = ShardedComm(comm).layout("c", 10).range(rank)
        ShardedComm(comm).all_gather(
            "c", full, contribution(0, 10, torch.float32)[start:stop]
        ).wait()
        return full


def test_a_float32_shard_is_gathered_as_bfloat16_when_the_full_buffer_is(ranks):
    for full in ranks.run(gather_in_another_dtype, 3):
        assert torch.equal(full, contribution(0, 10, torch.float32).bfloat16())


def gather_bytes(rank: int, size: int) -> list[bool]:
    """Quantised or masked state is only moved, so any dtype will do."""
    equal = []
    with open_small(size) as comm:
        for dtype in (torch.uint8, torch.bool, torch.int16, torch.float8_e4m3fn, torch.complex64):
            expected = (torch.arange(11) % 2).to(dtype)
            start, stop = ShardedComm(comm).layout("c", 11).range(rank)
            full = torch.zeros(11).to(dtype)
            ShardedComm(comm).all_gather("c", full, expected[start:stop].clone()).wait()
            equal.append(torch.equal(full.view(torch.uint8), expected.view(torch.uint8)))
    return equal


def test_a_gather_moves_any_dtype(ranks):
    assert ranks.run(gather_bytes, 3) == [[True] * 5] * 3


def reduce_everywhere(rank: int, size: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    with open_small(size) as comm:
        chunks = ShardedComm(comm)
        results = []
        for numel in NUMELS:
            mine = contribution(rank, numel, dtype)
            kept = mine.clone()
            start, stop = chunks.layout("c", numel).range(rank)
            own = torch.empty(stop - start, dtype=torch.float32)
            chunks.reduce_scatter("c", mine, own).wait()
            assert torch.equal(mine, kept), "the contribution was changed"
            everywhere = mine.clone()
            chunks.all_reduce("c", everywhere).wait()
            in_place = mine.clone()
            chunks.reduce_scatter("c", in_place).wait()
            results.append((own, everywhere, in_place[start:stop]))
        return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_reductions_equal_the_plain_sum_in_rank_order_to_the_bit(ranks, size, dtype):
    answers = ranks.run(reduce_everywhere, size, dtype)
    for index, numel in enumerate(NUMELS):
        expected = plain_sum(size, numel, dtype)
        shards = torch.cat([answer[index][0] for answer in answers])
        assert torch.equal(shards, expected)
        in_place = torch.cat([answer[index][2] for answer in answers])
        assert torch.equal(in_place, expected.to(dtype))
        for answer in answers:
            assert torch.equal(answer[index][1], expected.to(dtype)), "ranks differ"


def average(rank: int, size: int) -> list[torch.Tensor]:
    with open_small(size) as comm:
        chunks = ShardedComm(comm)
        mine = contribution(rank, 10, torch.float32)
        averaged, factors, narrow = mine.clone(), mine.clone(), mine.clone()
        chunks.all_reduce("c", averaged, op="avg").wait()
        chunks.all_reduce("c", factors, predivide=2.0, postdivide=4.0).wait()
        chunks.all_reduce("c", narrow, op="avg", dtype=torch.bfloat16).wait()
        huge = torch.full((4,), 60000.0, dtype=torch.float16)
        chunks.all_reduce("c", huge, op="avg", predivide=float(size)).wait()
        counts = torch.full((5,), rank, dtype=torch.int64)
        chunks.all_reduce("c", counts).wait()
        doubles = mine.double()
        chunks.all_reduce("c", doubles).wait()
        return [averaged, factors, narrow, huge, counts, doubles]


def test_averages_and_factors_and_communication_dtypes_do_what_they_say(ranks):
    expected = plain_sum(4, 10, torch.float32)
    rounded = sum(contribution(rank, 10, torch.float32).bfloat16().float() for rank in range(4))
    doubled = sum(contribution(rank, 10, torch.float32).double() for rank in range(4))
    for averaged, factors, narrow, huge, counts, doubles in ranks.run(average, 4):
        assert torch.equal(averaged, expected / 4)
        assert torch.allclose(factors, expected / 8)
        assert torch.equal(narrow, (rounded / 4).bfloat16().float())
        assert torch.equal(huge, torch.full((4,), 60000.0, dtype=torch.float16))
        assert counts.tolist() == [6] * 5
        assert torch.equal(doubles, doubled)


def send_from_each(rank: int, size: int) -> list[list[float]]:
    with open_small(size) as comm:
        got = []
        for src in range(size):
            buffer = torch.full((9,), float(rank))
            ShardedComm(comm).broadcast("c", buffer, src).wait()
            got.append(buffer.unique().tolist())
        return got


def test_broadcast_copies_from_any_rank(ranks):
    assert ranks.run(send_from_each, 3) == [[[0.0], [1.0], [2.0]]] * 3


def overlap_many(rank: int, size: int) -> bool:
    with open_small(size) as comm:
        chunks = ShardedComm(comm)
        fulls = [torch.full((50,), float(index * rank)) for index in range(40)]
        works = [chunks.all_reduce(f"c{index}", full) for index, full in enumerate(fulls)]
        for work in reversed(works):
            work.wait()
        return all((full == index * 3).all() for index, full in enumerate(fulls))


def test_many_collectives_in_flight_can_be_waited_for_in_any_order(ranks):
    assert ranks.run(overlap_many, 3) == [True] * 3


def refuse(rank: int, size: int) -> list[str]:
    said = []
    with open_small(size) as comm:
        chunks = ShardedComm(comm)
        flat = torch.zeros(8)
        for attempt in (
            lambda: chunks.all_gather("c7", flat.view(2, 4)),
            lambda: chunks.all_gather("c7", torch.zeros(8, requires_grad=True)),
            lambda: chunks.all_gather("c7", flat, torch.zeros(3)),
            lambda: chunks.reduce_scatter("c7", flat, op="median"),
            lambda: chunks.reduce_scatter("c7", flat, op="avg", postdivide=2.0),
            lambda: chunks.reduce_scatter("c7", flat, predivide=0.0),
            lambda: chunks.all_reduce("c7", flat.long(), op="avg"),
            lambda: chunks.broadcast("c7", flat, src=9),
            lambda: chunks.all_gather("c7", flat.to("meta")),
        ):
            with pytest.raises(CommValueError) as refused:
                attempt()
            said.append(str(refused.value))
        chunks.all_reduce("c7", flat).wait()  # refused calls have left nothing behind
    return said


def test_bad_arguments_are_refused_before_anything_is_sent(ranks):
    said = ranks.run(refuse, 2)[0]
    for text, word in zip(
        said,
        ["1-D", "requires_grad", "has 3", "median", "avg", "positive", "int64", "9", "meta"],
        strict=True,
    ):
        assert word in text


def reduce_natively(rank: int, size: int) -> list[torch.Tensor]:
    with open_small(size, native=True) as comm:
        chunks = ShardedComm(comm)
        mine = contribution(rank, 13, torch.float32)
        start, stop = chunks.layout("c", 13).range(rank)
        own = torch.empty(stop - start)
        chunks.reduce_scatter("c", mine, own, op="avg", predivide=2.0).wait()
        full = torch.empty(13)
        chunks.all_gather("c", full, own).wait()
        even = contribution(rank, 4 * size, torch.float32)
        part = torch.empty(4)
        chunks.reduce_scatter("c", even, part).wait()
        whole = torch.empty(4 * size, dtype=torch.bfloat16)
        chunks.all_gather("c", whole, part).wait()
        chunks.all_reduce("c", mine, dtype=torch.bfloat16).wait()
        return [full, whole, mine]


def test_the_backends_own_collectives_agree_within_rounding(ranks):
    for full, whole, mine in ranks.run(reduce_natively, 3):
        assert torch.allclose(full, plain_sum(3, 13, torch.float32) / 3, atol=1e-6)
        assert torch.allclose(whole.float(), plain_sum(3, 12, torch.float32), atol=0.05)
        assert torch.allclose(mine, plain_sum(3, 13, torch.float32), atol=0.1)
