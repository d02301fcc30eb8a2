"""The same order on every rank, whatever path each takes; absence is found, never a hang."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch

from patrickstar.comm import (
    Collective,
    CommError,
    Communicator,
    CommValueError,
    FlushReport,
    OrderedIssuer,
    ShardedComm,
    Slot,
    Work,
)

GATHER, REDUCE = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
NUMEL = 12
# A step of three chunks: forward gathers, backward gathers and reductions.
ORDER = [
    *(Slot(GATHER, chunk) for chunk in "abc"),
    *itertools.chain.from_iterable((Slot(GATHER, c), Slot(REDUCE, c)) for c in "cba"),
]


class Bench:
    """A rank with three chunks, an issuer, and a record of what it issued in which order."""

    def __init__(self, comm: Communicator, missing: str = "zeros") -> None:
        self.comm = comm
        self.chunks = ShardedComm(comm)
        self.issued: list[Slot] = []
        self.full = {chunk: torch.zeros(NUMEL) for chunk in "abc"}
        self.grads = {chunk: torch.zeros(NUMEL) for chunk in "abc"}
        self.issuer = OrderedIssuer(comm.control, self.absent, missing)

    def shard(self, chunk: str) -> torch.Tensor:
        start, stop = self.chunks.layout(chunk, NUMEL).range(self.comm.shard.rank)
        return torch.arange(start, stop).float() + ord(chunk)

    def gather(self, chunk: str):
        return self.issuer.request(GATHER, chunk, lambda: self._gather(chunk, self.full[chunk]))

    def reduce(self, chunk: str, value: float):
        self.grads[chunk].fill_(value)
        return self.issuer.request(REDUCE, chunk, lambda: self._reduce(chunk, self.grads[chunk]))

    def absent(self, slot: Slot) -> Work:
        if slot.collective is GATHER:
            return self._gather(slot.chunk, torch.empty(NUMEL))
        return self._reduce(slot.chunk, self.grads[slot.chunk].zero_())

    def reduced(self, chunk: str) -> float:
        start, stop = self.chunks.layout(chunk, NUMEL).range(self.comm.shard.rank)
        (value,) = self.grads[chunk][start:stop].unique().tolist()
        return value

    def _gather(self, chunk: str, full: torch.Tensor) -> Work:
        self.issued.append(Slot(GATHER, chunk))
        return self.chunks.all_gather(chunk, full, self.shard(chunk))

    def _reduce(self, chunk: str, grad: torch.Tensor) -> Work:
        self.issued.append(Slot(REDUCE, chunk))
        return self.chunks.reduce_scatter(chunk, grad)


def check_gathered(bench: Bench, chunk: str) -> None:
    assert torch.equal(bench.full[chunk], torch.arange(NUMEL).float() + ord(chunk))


def take_different_paths(rank: int, size: int) -> tuple[list[Slot], list[float], FlushReport]:
    with Communicator.open(timeout=15) as comm:
        bench = Bench(comm)
        bench.issuer.begin(ORDER)
        # Each rank leaves out the chunk of its own number, and waits for the others as it goes.
        used = [chunk for place, chunk in enumerate("abc") if place != rank]
        for chunk in used:
            bench.gather(chunk).wait()
            check_gathered(bench, chunk)
        for chunk in reversed(used):
            bench.gather(chunk).wait()
            bench.reduce(chunk, 10.0 ** (rank + 1))
        report = bench.issuer.flush()
        comm.drain()
        return bench.issued, [bench.reduced(chunk) for chunk in "abc"], report


def test_ranks_on_different_paths_issue_the_same_order_and_reduce_what_there_is(ranks):
    answers = ranks.run(take_different_paths, 3)
    for issued, reduced, report in answers:
        assert issued == ORDER
        assert reduced == [1100.0, 1010.0, 110.0]
        assert report.missing == {Slot(REDUCE, c): (r,) for r, c in ((2, "c"), (1, "b"), (0, "a"))}
        assert report.unused == ()


def skip_everything(rank: int, size: int) -> tuple[list[Slot], FlushReport]:
    with Communicator.open(timeout=15) as comm:
        bench = Bench(comm)
        bench.issuer.begin(ORDER)
        if rank != 1:  # rank 1 has no batch left
            for chunk in "ac":
                bench.gather(chunk).wait()
                check_gathered(bench, chunk)
        if rank == 0:
            bench.reduce("a", 1.0)
        report = bench.issuer.flush()
        comm.drain()
        assert comm.rank != 0 or bench.reduced("a") == 1.0
        return bench.issued, report


def test_a_rank_without_a_batch_takes_part_and_unused_places_are_reported(ranks):
    for issued, report in ranks.run(skip_everything, 3):
        assert issued == ORDER
        assert report.missing == {Slot(REDUCE, "a"): (1, 2)}
        assert Slot(GATHER, "b") in report.unused and Slot(REDUCE, "b") in report.unused
        assert Slot(GATHER, "a") in report.unused  # its place in the backward


def shuffle(rank: int, size: int, seed: int) -> tuple[list[Slot], list[float]]:
    """Random subsets in random orders, with random waits, for several steps."""
    with Communicator.open(timeout=20) as comm:
        bench = Bench(comm)
        own = random.Random(100 * seed + rank)
        sums = []
        for _ in range(6):
            bench.issuer.begin(ORDER)
            used = [chunk for chunk in "abc" if own.random() < 0.7]
            own.shuffle(used)
            tickets = []
            for chunk in used:
                tickets.append(bench.reduce(chunk, 1.0 + rank))
                time.sleep(own.random() * 0.005)
            bench.issuer.flush()
            own.shuffle(tickets)
            for ticket in tickets:
                ticket.wait()
                assert ticket.done()
            comm.drain()
            mine = [1.0 + rank if chunk in used else 0.0 for chunk in "abc"]
            assert [bench.reduced(chunk) for chunk in "abc"] == comm.reductions.sum(mine)
            sums += mine
        return bench.issued, sums


@pytest.mark.parametrize("seed", [1, 2])
def test_random_orders_and_subsets_on_every_rank_reduce_to_what_was_contributed(ranks, seed):
    answers = ranks.run(shuffle, 4, seed)
    assert all(issued == ORDER * 6 for issued, _ in answers)
    assert len({tuple(sums) for _, sums in answers}) == 4  # the ranks did differ


def insist(rank: int, size: int) -> tuple[str, tuple[int, ...], str, float]:
    with Communicator.open(timeout=15) as comm:
        bench = Bench(comm, missing="raise")
        bench.issuer.begin(ORDER)
        if rank != 2:
            bench.reduce("b", 1.0)
        with pytest.raises(CommError) as caught:
            bench.issuer.flush()
        # Everybody learned it, nothing is stuck, and the next step works.
        comm.drain()
        bench.issuer.begin(ORDER)
        for chunk in "cba":
            bench.reduce(chunk, 2.0)
        assert bench.issuer.flush().missing == {}
        comm.drain()
        error = caught.value
        return str(error), error.ranks, error.chunk, bench.reduced("b")


def test_a_missing_contribution_is_an_error_on_every_rank_that_names_the_chunk_and_ranks(ranks):
    for text, blamed, chunk, later in ranks.run(insist, 3):
        assert "reduce-scatter of chunk 'b': ranks [2]" in text
        assert (blamed, chunk, later) == ((2,), "b", 6.0)


def misuse(rank: int, size: int) -> list[str]:
    said = []
    with Communicator.open(timeout=15) as comm:
        bench = Bench(comm)
        with pytest.raises(CommValueError) as caught:
            bench.gather("a")
        said.append(str(caught.value))
        bench.issuer.begin(ORDER)
        with pytest.raises(CommValueError) as caught:
            bench.issuer.begin(ORDER)
        said.append(str(caught.value))
        with pytest.raises(CommError) as caught:
            bench.issuer.request(Collective.ALL_REDUCE, "a", lambda: bench.absent(ORDER[0]))
        said.append(str(caught.value))
        assert bench.issuer.closed(GATHER, "b") is None
        bench.gather("c").wait()  # closes the places of a and b
        bench.issuer.closed(GATHER, "b").wait()
        bench.gather("a")  # its second place
        with pytest.raises(CommError) as caught:
            bench.gather("a")
        said.append(str(caught.value))
        bench.reduce("a", 1.0)
        with pytest.raises(CommError) as caught:
            bench.reduce("a", 1.0)
        said.append(str(caught.value))
        bench.issuer.flush()
        with pytest.raises(CommValueError):
            OrderedIssuer(comm.control, bench.absent, missing="ignore")
    return said


def test_requests_that_cannot_be_met_are_refused_and_say_why(ranks):
    for said in ranks.run(misuse, 2):
        begun, flushed, unknown, late, twice = said
        assert "begin" in begun and "flush" in flushed
        assert "all-reduce of chunk 'a' was asked for 1 times" in unknown
        assert "all-gather, all-gather, reduce-scatter" in unknown
        assert "all-gather of chunk 'a' comes too late" in late
        assert "asked for 2 times, the order of this step has it 1 times" in twice


def begin_differently(rank: int, size: int) -> tuple[str, tuple[int, ...], list[Slot]]:
    with Communicator.open(timeout=15) as comm:
        bench = Bench(comm)
        with pytest.raises(CommError) as caught:
            bench.issuer.begin(ORDER[1:] if rank == 1 else ORDER)
        order = bench.issuer.agree([Slot(GATHER, "abc"[rank]), Slot(REDUCE, "z\u00e9 9")])
        return str(caught.value), caught.value.ranks, order


def test_ranks_with_another_order_are_named_and_can_agree_on_one(ranks):
    answers = ranks.run(begin_differently, 3)
    for text, blamed, order in answers:
        assert "another order" in text
        assert blamed == (1,)
        assert order == answers[0][2]
        assert set(order) == {*(Slot(GATHER, chunk) for chunk in "abc"), Slot(REDUCE, "z\u00e9 9")}


def end_step(bench: Bench, ticket: Work) -> None:
    ticket.wait()
    bench.issuer.flush()


def never_flush(rank: int, size: int) -> tuple[str, tuple[int, ...], float]:
    comm = Communicator.open(timeout=2.5)
    bench = Bench(comm)
    bench.issuer.begin(ORDER)
    ticket = bench.gather("a")
    if rank == 1:
        time.sleep(6)
    start = time.monotonic()
    with pytest.raises(CommError) as caught:
        end_step(bench, ticket)
    return str(caught.value), caught.value.ranks, time.monotonic() - start


def test_a_rank_that_never_flushes_is_named_within_the_timeout(ranks):
    answers = ranks.run(never_flush, 3)
    for text, blamed, seconds in (answers[0], answers[2]):
        assert blamed == (1,)
        assert "rank 1 is alive but has not started it" in text
        assert seconds < 6.0
