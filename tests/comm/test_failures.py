"""What goes wrong is an error that names who, what and which chunk, within a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from patrickstar.comm import CommError, Communicator, OwnerComm, ShardedComm
from tests.rank_pool import ROOT, Died

TIMEOUT = 2.5
# The timeout, a few beats to find out who it was, and a busy machine.
LIMIT = TIMEOUT + 3.5


def told(error: CommError) -> dict[str, object]:
    return {
        "text": str(error),
        "collective": error.collective,
        "chunk": error.chunk,
        "ranks": error.ranks,
    }


def wait_for_error(comm: Communicator, work: object) -> dict[str, object]:
    """Wait, and wait again for something submitted later: both fail, and quickly."""
    start = time.monotonic()
    with pytest.raises(CommError) as caught:
        work.wait()
    assert time.monotonic() - start < LIMIT
    start = time.monotonic()
    with pytest.raises(CommError):
        ShardedComm(comm).all_reduce("later", torch.ones(4)).wait()
    with pytest.raises(CommError):
        comm.barrier()
    assert time.monotonic() - start < 1.0, "what follows an error must fail at once"
    return told(caught.value)


def lose_a_rank(rank: int, size: int, fate: str) -> dict[str, object]:
    comm = Communicator.open(timeout=TIMEOUT)
    chunks = ShardedComm(comm)
    chunks.all_reduce("before", torch.ones(1000)).wait()
    if rank == 1:
        if fate == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)  # the others are in the middle of it
        os.kill(os.getpid(), signal.SIGKILL if fate == "killed later" else signal.SIGSTOP)
    work = chunks.reduce_scatter("c7", torch.ones(100_000))
    return wait_for_error(comm, work)


@pytest.mark.parametrize(("size", "fate"), [(3, "killed"), (2, "killed later")])
def test_a_killed_peer_is_named_with_the_collective_and_the_chunk(ranks, size, fate):
    answers = ranks.run(lose_a_rank, size, fate)
    assert isinstance(answers.pop(1), Died)
    for answer in answers:
        assert answer["ranks"] == (1,)
        assert "reduce-scatter of chunk 'c7'" in answer["text"]
        assert "rank 1 gave no sign of life" in answer["text"]
        assert (answer["collective"], answer["chunk"]) == ("reduce-scatter", "c7")


def freeze(rank: int, size: int) -> dict[str, object] | None:
    comm = Communicator.open(timeout=TIMEOUT)
    if rank == 1:
        # Wakes up after the others have given up.
        waker = subprocess.Popen(["sh", "-c", f"sleep {LIMIT}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()
        return None
    return wait_for_error(comm, ShardedComm(comm).all_gather("c3", torch.ones(9)))


def test_a_frozen_peer_is_named_when_the_time_is_up(ranks):
    answers = ranks.run(freeze, 3)
    for answer in (answers[0], answers[2]):
        assert answer["ranks"] == (1,)
        assert "rank 1 gave no sign of life" in answer["text"]


def come_late(rank: int, size: int) -> dict[str, object]:
    comm = Communicator.open(timeout=TIMEOUT)
    chunks = ShardedComm(comm)
    chunks.all_reduce("c1", torch.ones(10)).wait()
    if rank == 2:
        time.sleep(LIMIT)
    return wait_for_error(comm, chunks.all_reduce("c2", torch.ones(10)))


def test_a_rank_that_lives_but_does_not_come_is_named_with_the_last_it_did(ranks):
    answers = ranks.run(come_late, 3)
    for answer in answers[:2]:
        assert answer["ranks"] == (2,)
        assert "rank 2 is alive but has not started it" in answer["text"]
        assert "all-reduce of chunk 'c1'" in answer["text"]
    assert answers[2]["ranks"] == (2,)  # and the late rank learns why nobody waits for it


def finish(work: object, comm: Communicator) -> None:
    """A rank that got what it wanted, from an owner that believes to be one, learns it next."""
    work.wait()
    comm.barrier()


def disagree(rank: int, size: int, about: str) -> tuple[dict[str, object], float]:
    comm = Communicator.open(timeout=10.0)
    chunks = ShardedComm(comm)
    odd = rank == 1
    start = time.monotonic()
    if about == "collective":
        full = torch.ones(12)
        work = chunks.all_gather("c1", full) if odd else chunks.all_reduce("c1", full)
    elif about == "chunk":
        work = chunks.all_reduce("c2" if odd else "c1", torch.ones(12))
    elif about == "size":
        work = chunks.all_reduce("c1", torch.ones(1200 if odd else 12))
    elif about == "dtype":
        work = chunks.all_reduce("c1", torch.ones(12, dtype=torch.float64 if odd else None))
    elif about == "owner":
        work = OwnerComm(comm, {"c1": 0 if odd else 2}).all_gather("c1", torch.ones(12))
    elif about == "source":
        work = chunks.broadcast("c1", torch.ones(12), src=0 if odd else 2)
    else:
        work = chunks.all_reduce("c1", torch.ones(12), op="sum" if odd else "avg")
    with pytest.raises(CommError) as caught:
        finish(work, comm)
    return told(caught.value), time.monotonic() - start


@pytest.mark.parametrize("about", ["collective", "chunk", "size", "dtype", "owner", "source", "op"])
def test_ranks_that_disagree_are_told_what_each_runs_long_before_the_timeout(ranks, about):
    for answer, seconds in ranks.run(disagree, 3, about):
        assert "ranks disagree about the next collective" in answer["text"]
        assert "of chunk 'c1'" in answer["text"]
        assert answer["ranks"] == (1,)
        assert "rank 0 runs" in answer["text"] and "rank 1 runs" in answer["text"]
        assert seconds < 7.0


def fail_alone(rank: int, size: int) -> dict[str, object]:
    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if rank == 1 and numel > 1000:
            raise MemoryError("the arena is full")
        return torch.empty(numel, dtype=dtype, device=device)

    comm = Communicator.open(timeout=10.0, allocate=allocate)
    # Staged in another dtype, which allocates.
    work = ShardedComm(comm).all_reduce("c9", torch.ones(5000), dtype=torch.bfloat16)
    with pytest.raises(CommError) as caught:
        work.wait()
    return told(caught.value)


def test_a_rank_that_fails_inside_a_collective_takes_the_others_along_with_its_reason(ranks):
    for answer in ranks.run(fail_alone, 3):
        assert answer["ranks"] == (1,)
        assert "MemoryError: the arena is full" in answer["text"]


def raise_in_the_step(rank: int, size: int) -> dict[str, object]:
    start = time.monotonic()
    try:
        with Communicator.open(timeout=10.0) as comm:
            if rank == 0:
                raise KeyError("no such expert")
            ShardedComm(comm).all_reduce("c4", torch.ones(8)).wait()
    except CommError as error:
        return told(error) | {"seconds": time.monotonic() - start}
    except KeyError:
        return {}
    raise AssertionError("no error")


def test_an_exception_on_one_rank_ends_the_others_waits_with_its_text(ranks):
    _, *answers = ranks.run(raise_in_the_step, 3)
    for answer in answers:
        assert answer["ranks"] == (0,)
        assert "KeyError: 'no such expert'" in answer["text"]
        assert answer["seconds"] < 7.0


def leave_early(rank: int, size: int) -> dict[str, object]:
    comm = Communicator.open(timeout=10.0)
    if rank == 0:
        comm.close()
        return {}
    with pytest.raises(CommError) as caught:
        comm.reductions.sum([1.0])
    return told(caught.value)


def test_a_rank_that_closed_its_communicator_is_named(ranks):
    _, *answers = ranks.run(leave_early, 3)
    for answer in answers:
        assert answer["ranks"] == (0,)
        assert "rank 0 closed the communicator" in answer["text"]
        assert "sum of scalars" in answer["text"]


def use_after_close(rank: int, size: int) -> str:
    comm = Communicator.open(timeout=TIMEOUT)
    buffer = torch.ones(100_000)
    work = ShardedComm(comm).all_reduce("c1", buffer)
    comm.close()
    comm.close()
    assert work.done() and buffer[0] == size, "close() must finish what was submitted"
    with pytest.raises(CommError) as caught:
        ShardedComm(comm).all_reduce("c2", buffer)
    return str(caught.value)


def test_close_finishes_what_was_submitted_and_nothing_starts_after_it(ranks):
    for text in ranks.run(use_after_close, 2):
        assert "all-reduce of chunk 'c2'" in text and "closed" in text


def wait_a_little(rank: int, size: int) -> tuple[str, float]:
    with Communicator.open(timeout=10.0) as comm:
        if rank == 1:
            time.sleep(1.0)
        buffer = torch.ones(8)
        work = ShardedComm(comm).all_reduce("c1", buffer)
        text = ""
        if rank == 0:
            with pytest.raises(CommError) as caught:
                work.wait(timeout=0.2)
            text = str(caught.value)
        work.wait()
        return text, buffer.sum().item()


def test_a_wait_that_is_given_up_leaves_the_collective_running(ranks):
    answers = ranks.run(wait_a_little, 2)
    assert "all-reduce of chunk 'c1'" in answers[0][0] and "0.2 s" in answers[0][0]
    assert [total for _, total in answers] == [16.0, 16.0]


PROGRAM = """
import sys, time
import torch, torch.distributed as dist
from patrickstar.comm import Communicator, ShardedComm
rank, store, timeout, mistake = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
comm = Communicator.open(timeout=timeout)
if rank == 1:
    time.sleep(40)
work = ShardedComm(comm).all_reduce("c1", torch.ones(1 << 20))
if mistake:
    time.sleep(0.5)
    raise KeyError(mistake)
work.wait()
"""


@pytest.mark.parametrize(
    ("timeout", "mistake", "expected"),
    [
        ("3.0", "", "rank 1 is alive but has not started it"),
        ("600.0", "not mine", "KeyError: 'not mine'"),
    ],
)
def test_a_process_that_fails_ends_with_a_traceback_and_does_not_linger(
    tmp_path, timeout, mistake, expected
):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store"), timeout, mistake],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, text = started[0].communicate(timeout=25)
        assert started[0].returncode == 1, text
        assert expected in text
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_without_a_process_group_the_error_says_what_to_do():
    with pytest.raises(CommError, match="torchrun"):
        Communicator.open()


def miss_the_opening(rank: int, size: int) -> str:
    if rank == 1:
        return ""
    with pytest.raises(CommError) as caught:
        Communicator.open(timeout=1.0)
    return str(caught.value)


def test_a_rank_that_never_opens_is_an_error_within_the_timeout(ranks):
    assert "(0, 1)" in ranks.run(miss_the_opening, 2)[0]
