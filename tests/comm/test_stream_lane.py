"""The lane of accelerators: what is queued where, and how long buffers live.

Streams are simulated: each is a list of what was queued, and the device runs only when told to.
The last test runs on a real accelerator where there is one.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from patrickstar.comm import Collective, CommCounters, CommError, Communicator, ShardedComm
from patrickstar.comm.call import Call, Kind, Turn
from patrickstar.comm.progress import Progress
from patrickstar.comm.stream_lane import StreamLane


class FakeEvent:
    def __init__(self, device: FakeDevice, stream: FakeStream) -> None:
        self.happened, self.time = False, 0.0
        self.device = device
        stream.queued.append(self)

    def query(self) -> bool:
        return self.happened

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.time - self.time


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.queued: list[object] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.queued.append(("wait", event))


class FakeDevice:
    """`Streams` whose streams run when `run` is called."""

    def __init__(self) -> None:
        self.created = 0
        self.caller = self.on = FakeStream("caller")
        self.streams = [self.caller]
        self.ran: list[str] = []
        self.clock = 0.0

    def new_stream(self) -> FakeStream:
        self.created += 1
        self.streams.append(FakeStream(f"side {self.created}"))
        return self.streams[-1]

    def current(self) -> FakeStream:
        return self.on

    def record(self, stream: FakeStream) -> FakeEvent:
        return FakeEvent(self, stream)

    @contextlib.contextmanager
    def use(self, stream: FakeStream):
        before, self.on = self.on, stream
        yield
        self.on = before

    def queue(self, name: str) -> None:
        self.on.queued.append(name)

    def run(self, stream: FakeStream) -> None:
        """Run all of `stream` that does not wait for something that has not happened."""
        while stream.queued:
            step = stream.queued[0]
            if isinstance(step, tuple) and not step[1].happened:
                return
            stream.queued.pop(0)
            self.clock += 1.0
            if isinstance(step, FakeEvent):
                step.happened, step.time = True, self.clock
            elif isinstance(step, str):
                self.ran.append(step)


def explain(failed: Call, raised: BaseException) -> CommError:
    return CommError(f"{failed}: {raised}")


def call(seq: int) -> Call:
    return Call(Kind.DATA, seq, "all-gather", f"c{seq}", 4, "float32")


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture
def counters():
    return CommCounters()


@pytest.fixture
def lane(device, counters):
    return StreamLane(device, 1.0, Progress(), counters, explain)


def submit(lane: StreamLane, device: FakeDevice, seq: int, *buffers: torch.Tensor):
    return lane.submit(call(seq), lambda _: device.queue(f"collective {seq}"), buffers)


def test_a_collective_runs_after_its_inputs_and_before_what_waits_for_it(device, lane):
    side = device.streams[1]
    device.queue("compute the input")
    work = submit(lane, device, 1)
    device.queue("compute beside it")
    work.wait()
    device.queue("use the result")
    device.run(side)
    assert device.ran == [], "the collective must not overtake its input"
    device.run(device.caller)
    assert device.ran == ["compute the input", "compute beside it"], "the result was not awaited"
    device.run(side)
    device.run(device.caller)
    assert device.ran[2:] == ["collective 1", "use the result"]


def test_an_observer_is_told_when_a_collective_ran_and_on_what(device, lane, counters):
    class Heard(list):
        def collective(self, *what):
            self.append(what)

    counters.observer = heard = Heard()
    before = time.perf_counter()
    for seq in (1, 2):
        submit(lane, device, seq)
    after = time.perf_counter()
    for stream in (device.caller, device.streams[1]):
        device.run(stream)
    lane.poll()
    assert [what[:3] for what in heard] == [("all-gather", f"c{seq}", 16) for seq in (1, 2)]
    ticks = 0.001 * device.clock  # the clock of the device goes up by a millisecond a step
    for _, _, _, began, ended in heard:
        assert before <= began <= ended <= after + ticks
    assert sum(ended - began for _, _, _, began, ended in heard) == pytest.approx(
        counters[Collective.ALL_GATHER].busy_seconds
    )


def test_one_side_stream_serves_all_collectives(device, lane):
    for seq in range(1, 6):
        submit(lane, device, seq).wait()
    assert device.created == 1


def test_buffers_live_until_the_callers_stream_waits_for_the_collective(device, lane):
    buffer = torch.zeros(4)
    alive = weakref.ref(buffer)
    work = submit(lane, device, 1, buffer)
    del buffer
    gc.collect()
    assert alive() is not None
    work.wait()
    gc.collect()
    assert alive() is None


def test_buffers_of_a_collective_nobody_waits_for_go_when_it_has_happened(device, lane, counters):
    buffer = torch.zeros(4)
    alive = weakref.ref(buffer)
    submit(lane, device, 1, buffer)
    del buffer
    lane.poll()
    gc.collect()
    assert alive() is not None
    device.run(device.caller)
    device.run(device.streams[1])
    lane.poll()
    gc.collect()
    assert alive() is None
    # begun -> collective -> ended: two ticks of the device's clock, in milliseconds
    assert counters[Collective.ALL_GATHER].busy_seconds == pytest.approx(0.002)


def test_a_wait_with_a_timeout_blocks_the_host_and_gives_up(device, lane):
    work = submit(lane, device, 1)
    with pytest.raises(CommError, match=r"'c1'.*not finished within 0\.01 s"):
        work.wait(timeout=0.01)
    assert not work.done() and not lane.drain(0.01)
    device.run(device.caller)
    device.run(device.streams[1])
    work.wait(timeout=0.01)
    assert work.done() and lane.drain(0.01)


def test_a_failure_ends_every_wait_and_submission_after_it(device, lane):
    work = submit(lane, device, 1)

    def fail(_: Turn) -> None:
        raise RuntimeError("NCCL error")

    with pytest.raises(CommError, match=r"'c2'.*NCCL error"):
        lane.submit(call(2), fail, [])
    with pytest.raises(CommError, match="NCCL error"):
        work.wait()
    with pytest.raises(CommError, match="NCCL error"):
        submit(lane, device, 3)


@pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="needs an accelerator; this machine has none"
)
def test_on_a_real_accelerator_a_group_of_one_gathers_and_reduces(tmp_path):
    kind = torch.accelerator.current_accelerator().type
    backend = dist.get_default_backend_for_device(kind)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(f"cpu:gloo,{kind}:{backend}", store=store, rank=0, world_size=1)
    try:
        with Communicator.open(timeout=30) as comm:
            assert comm.device.type == kind
            chunks = ShardedComm(comm)
            full = torch.arange(1000, device=comm.device, dtype=torch.float32)
            own = torch.empty_like(full)
            works = [chunks.reduce_scatter("c", full, own) for _ in range(5)]
            works += [chunks.all_gather("c", full.zero_(), own)]
            works[-1].wait(timeout=30)
            assert comm.reductions.sum([1.0]) == [1.0]
            comm.drain()
            assert comm.counters[Collective.REDUCE_SCATTER].calls == 5
    finally:
        dist.destroy_process_group()
