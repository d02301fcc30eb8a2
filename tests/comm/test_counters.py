"""Counted bytes: the ring model, and what the kernel saw this process send."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from patrickstar.comm import (
    Collective,
    CommCounters,
    Communicator,
    OwnerComm,
    ShardedComm,
    ring_bytes,
)

NUMEL = 600_000  # divides by 2, 3 and 4


def test_the_ring_model_sends_n_minus_one_nths_per_pass():
    assert ring_bytes(Collective.ALL_GATHER, 1200, 4) == 900
    assert ring_bytes(Collective.REDUCE_SCATTER, 1200, 3) == 800
    assert ring_bytes(Collective.ALL_REDUCE, 1200, 4) == 1800
    assert ring_bytes(Collective.BROADCAST, 1200, 1) == 0


def test_totals_add_up_and_reset():
    counters = CommCounters()
    counters.add(Collective.BROADCAST, calls=1, wire_bytes=10, busy_seconds=0.5)
    counters.add(Collective.BROADCAST, calls=1, wire_bytes=5)
    counters.add(Collective.ALL_REDUCE, wire_bytes=1)
    assert counters.wire_bytes() == 16
    assert counters.snapshot()["broadcast"].calls == 2
    assert counters[Collective.BROADCAST].busy_seconds == 0.5
    counters.reset()
    assert counters.snapshot() == {}


def bytes_written() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise AssertionError("no wchar in /proc/self/io")


def count(rank: int, size: int, shard_size: int) -> dict[str, tuple[int, int, int, int]]:
    counted = {}
    with Communicator.open(timeout=20, shard_size=shard_size) as comm:
        sharded, owned = ShardedComm(comm), OwnerComm(comm, {"c": shard_size - 1})
        full = torch.zeros(NUMEL)
        part = torch.zeros(NUMEL // shard_size)
        actions = {
            "all-gather": lambda: sharded.all_gather("c", full, part),
            "reduce-scatter": lambda: sharded.reduce_scatter("c", full, part),
            "bf16 reduce-scatter": lambda: sharded.reduce_scatter(
                "c", full, part, dtype=torch.bfloat16
            ),
            "all-reduce": lambda: sharded.all_reduce("c", full),
            "broadcast": lambda: sharded.broadcast("c", full, 0),
            "owner all-gather": lambda: owned.all_gather("c", full),
            "owner reduce-scatter": lambda: owned.reduce_scatter("c", full),
        }
        for name, action in actions.items():
            comm.barrier()
            comm.counters.reset()
            before = bytes_written()
            action().wait()
            comm.barrier()
            (totals,) = comm.counters.snapshot().values()
            assert totals.calls == 1 and totals.busy_seconds > 0
            counted[name] = (
                totals.payload_bytes,
                totals.wire_bytes,
                totals.sent_bytes,
                bytes_written() - before,
            )
    return counted


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/io")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_counted_bytes_equal_the_theory_and_what_the_kernel_saw(ranks, size):
    payload = NUMEL * 4
    ring = payload * (size - 1) // size
    theory = {
        "all-gather": (payload, ring),
        "reduce-scatter": (payload, ring),
        "bf16 reduce-scatter": (payload // 2, ring // 2),
        "all-reduce": (payload, 2 * ring),
    }
    answers = ranks.run(count, size, size)
    for counted in answers:
        for name, (expected_payload, expected_wire) in theory.items():
            payload_bytes, wire_bytes, sent_bytes, kernel_bytes = counted[name]
            assert payload_bytes == expected_payload
            assert wire_bytes == sent_bytes == expected_wire
            assert sent_bytes <= kernel_bytes <= sent_bytes * 1.02 + 20_000
    for name in ("broadcast", "owner all-gather", "owner reduce-scatter"):
        # One rank sends, or all but one do: the model holds for the mean over ranks.
        assert all(answer[name][1] == ring for answer in answers)
        assert sum(answer[name][2] for answer in answers) == payload * (size - 1)


def test_a_hybrid_reduction_adds_the_bytes_across_copies(ranks):
    payload = NUMEL * 4
    for counted in ranks.run(count, 4, 2):
        assert counted["all-gather"][1:3] == (payload // 2, payload // 2)
        expected = payload // 2 + payload // 2  # 1/2 S inside, 2 * 1/2 * S/2 across
        assert counted["reduce-scatter"][1:3] == (expected, expected)
        assert counted["all-reduce"][1:3] == (expected + payload // 2,) * 2
