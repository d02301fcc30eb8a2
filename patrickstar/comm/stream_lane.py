"""The lane of accelerator groups: one side stream.

The stream is created once. A job is queued on it behind everything the caller's stream holds at
that moment (its inputs), and the caller's stream waits for it only in `wait()`.

What a job reads and writes must not be freed before the device is done with it. Instead of
`Tensor.record_stream`, which delays reuse by an unpredictable time, the buffers are kept with
their event in one small record, as FSDP2 does: dropped when the caller's stream has been made to
wait (whatever it queues afterwards comes after the job), or when the event is seen to have
happened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from patrickstar.comm.call import Call, Turn
from patrickstar.comm.counters import CommCounters
from patrickstar.comm.errors import CommError
from patrickstar.comm.lane import Explain, Job
from patrickstar.comm.progress import Progress
from patrickstar.comm.streams import Streams

_POLL_SECONDS = 0.001


@dataclass
class InFlight:
    """A job on the side stream, its end, and what it must not lose before.

    `origin` is an event that happened at the time `at` of `time.perf_counter`: an event knows only
    how long after another one it was.
    """

    call: Call
    begun: torch.Event
    ended: torch.Event
    origin: torch.Event
    at: float
    buffers: tuple[torch.Tensor, ...] = field(repr=False)


class StreamWork:
    """The handle of a job on the side stream."""

    def __init__(self, lane: StreamLane, in_flight: InFlight) -> None:
        self._lane = lane
        self._in_flight = in_flight

    def wait(self, timeout: float | None = None) -> None:
        self._lane.hand_over(self._in_flight, timeout)

    def done(self) -> bool:
        return self._in_flight.ended.query()


class StreamLane:
    """Queues jobs on a stream of its own.

    Args:
        streams: stream operations of the device.
        timeout: seconds that one job may take where the host waits; where it does not, the
            backend's watchdog guards the job with the process group's timeout.
        progress: told which call was queued last.
        counters: given the seconds and bytes of each call.
        explain: called with what a job raised while it was queued.
    """

    def __init__(
        self,
        streams: Streams,
        timeout: float,
        progress: Progress,
        counters: CommCounters,
        explain: Explain,
    ) -> None:
        self._streams = streams
        self._side = streams.new_stream()
        self._timeout = timeout
        self._progress = progress
        self._counters = counters
        self._explain = explain
        self._lock = threading.Lock()  # the watch polls from its thread
        self._in_flight: list[InFlight] = []
        self._origin = streams.record(self._side), time.perf_counter()
        self._error: CommError | None = None

    def submit(self, call: Call, job: Job, buffers: Sequence[torch.Tensor]) -> StreamWork:
        self._check()
        self.poll()
        if not self._in_flight:  # the stream is idle, so this happens now
            self._origin = self._streams.record(self._side), time.perf_counter()
        self._side.wait_event(self._streams.record(self._streams.current()))
        self._progress.start(call)
        turn = Turn.start(call, self._timeout)
        try:
            with self._streams.use(self._side):
                begun = self._streams.record(self._side)
                job(turn)
                ended = self._streams.record(self._side)
        except Exception as raised:
            self._error = self._explain(call, raised)
            raise self._error from raised
        in_flight = InFlight(call, begun, ended, *self._origin, tuple(buffers))
        with self._lock:
            self._in_flight.append(in_flight)
        return StreamWork(self, in_flight)

    def hand_over(self, in_flight: InFlight, timeout: float | None) -> None:
        """Order the caller's stream behind a job; with `timeout`, wait on the host as well."""
        self._check()
        self._streams.current().wait_event(in_flight.ended)
        in_flight.buffers = ()
        if timeout is None:
            return
        begun = time.perf_counter()
        while not in_flight.ended.query():
            if time.perf_counter() - begun > timeout:
                raise CommError(
                    f"{in_flight.call} has not finished within {timeout} s",
                    collective=in_flight.call.collective,
                    chunk=in_flight.call.chunk,
                )
            self._check()
            time.sleep(_POLL_SECONDS)
        self._counters.waited(in_flight.call, begun, time.perf_counter())
        self.poll()

    def fail(self, error: CommError) -> None:
        if self._error is None:
            self._error = error

    def drain(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while self._in_flight and time.monotonic() < deadline:
            self.poll()
            time.sleep(_POLL_SECONDS)
        return not self._in_flight

    def poll(self) -> None:
        """Drop the records of jobs that have ended, in order, and count their time."""
        with self._lock:
            while self._in_flight and self._in_flight[0].ended.query():
                ended = self._in_flight.pop(0)
                self._progress.finish(ended.call)
                begun = ended.at + ended.origin.elapsed_time(ended.begun) / 1000
                seconds = ended.begun.elapsed_time(ended.ended) / 1000
                self._counters.ran(ended.call, begun, begun + seconds)

    def close(self) -> None:
        self.fail(CommError("the communicator is closed"))

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
