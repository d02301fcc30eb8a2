"""Scalars over ranks."""

from __future__ import annotations

import math

import torch

from patrickstar.comm import Communicator

VALUES = [1e16, 1.0, -1e16, 1.0]  # the sum depends on the order


def reduce_scalars(rank: int, size: int) -> tuple[list[float], ...]:
    with Communicator.open(timeout=20) as comm:
        scalars = comm.reductions
        return (
            scalars.sum([VALUES[rank], 0.1]),
            scalars.max([float(rank), -float(rank), math.nan if rank == 1 else 0.0]),
            [float(flag) for flag in scalars.any([rank == 2, False, True])],
            scalars.sum([]),
        )


def test_scalars_are_reduced_in_rank_order_in_float64_the_same_everywhere(ranks):
    answers = ranks.run(reduce_scalars, 4)
    tenth = ((0.1 + 0.1) + 0.1) + 0.1
    for total, largest, flags, empty in answers:
        assert total == [((1e16 + 1.0) - 1e16) + 1.0, tenth]
        assert largest[:2] == [3.0, 0.0] and math.isnan(largest[2])
        assert flags == [1.0, 0.0, 1.0]
        assert empty == []


def beside_the_lane(rank: int, size: int) -> list[float]:
    from patrickstar.comm import ShardedComm

    with Communicator.open(timeout=20) as comm:
        buffers = [torch.ones(200_000) for _ in range(20)]
        works = [ShardedComm(comm).all_reduce("c", buffer) for buffer in buffers]
        totals = [comm.reductions.sum([float(rank * i)])[0] for i in range(50)]
        for work, buffer in zip(works, buffers, strict=True):
            work.wait()
            assert buffer.unique().tolist() == [float(size)]
        return totals


def test_scalars_do_not_queue_behind_chunks_in_flight(ranks):
    assert ranks.run(beside_the_lane, 3) == [[3.0 * i for i in range(50)]] * 3
