"""The lane of CPU groups: order, buffers, failure."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from patrickstar.comm import Collective, CommCounters, CommError
from patrickstar.comm.call import Call, Kind, Turn
from patrickstar.comm.progress import Progress
from patrickstar.comm.thread_lane import ThreadLane


def call(seq: int) -> Call:
    return Call(Kind.DATA, seq, "all-gather", f"c{seq}", 4, "float32")


def explain(failed: Call, raised: BaseException) -> CommError:
    return CommError(f"{failed}: {raised}", ranks=[3])


@pytest.fixture
def counters():
    return CommCounters()


@pytest.fixture
def lane(counters):
    lane = ThreadLane(5.0, Progress(), counters, explain)
    yield lane
    lane.close()


def test_jobs_run_in_the_order_they_were_submitted_off_the_callers_thread(lane):
    ran: list[tuple[int, bool]] = []
    here = threading.get_ident()
    works = [
        lane.submit(
            call(seq), lambda _, seq=seq: ran.append((seq, threading.get_ident() != here)), []
        )
        for seq in range(1, 30)
    ]
    works[-1].wait()
    assert ran == [(seq, True) for seq in range(1, 30)]
    assert all(work.done() for work in works)


def test_buffers_live_until_the_job_has_run_and_no_longer(lane):
    gate = threading.Event()
    buffer = torch.zeros(4)
    alive = weakref.ref(buffer)
    work = lane.submit(call(1), lambda _: gate.wait(), [buffer])
    del buffer
    gc.collect()
    assert alive() is not None
    gate.set()
    work.wait()
    deadline = time.monotonic() + 5.0
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.01)  # the lane's thread is about to drop it, without another job coming
        gc.collect()
    assert alive() is None


def test_a_failed_job_fails_what_is_queued_behind_it_and_everything_after(lane):
    gate = threading.Event()

    def fail(_: Turn) -> None:
        gate.wait()
        raise OSError("cable cut")

    before = lane.submit(call(1), lambda _: None, [])
    failing, queued = lane.submit(call(2), fail, []), lane.submit(call(3), pytest.fail, [])
    gate.set()
    before.wait()
    with pytest.raises(CommError, match="cable cut") as caught:
        failing.wait()
    assert (caught.value.chunk, caught.value.ranks) == ("c2", (3,))
    with pytest.raises(CommError, match=r"'c3'.* was not run: .*'c2'.*cable cut") as caught:
        queued.wait()
    assert (caught.value.chunk, caught.value.ranks) == ("c3", (3,))
    with pytest.raises(CommError, match=r"'c4'.* was not run"):
        lane.submit(call(4), lambda _: None, [])


def test_failing_from_outside_ends_waits_at_once_although_the_job_still_runs(lane):
    gate = threading.Event()
    work = lane.submit(call(1), lambda _: gate.wait(), [])
    lane.fail(CommError("rank 2 is gone", ranks=[2]))
    with pytest.raises(CommError, match="rank 2 is gone"):
        work.wait()
    gate.set()


def test_a_wait_can_be_given_up_and_taken_up_again(lane, counters):
    gate = threading.Event()
    work = lane.submit(call(1), lambda _: gate.wait(), [])
    with pytest.raises(CommError, match=r"not finished within 0\.05 s"):
        work.wait(timeout=0.05)
    assert not work.done() and not lane.drain(0.05)
    gate.set()
    work.wait()
    assert lane.drain(1.0)
    assert counters[Collective.ALL_GATHER].waited_seconds >= 0.05
    assert counters[Collective.ALL_GATHER].busy_seconds >= 0.1
