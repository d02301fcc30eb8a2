"""A recorded run in the trace-event format, for ui.perfetto.dev and chrome://tracing.

Google's "Trace Event Format", the JSON object form. Times are microseconds. A tier is a process
with counters of its memory by kind and marks where chunks leave; the engine is a process with
threads for the parts of a step, updates and waits; copies have a process with a thread for each
way. Events are handed out one by one, so that a run of any length is written in bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from patrickstar.report.format import Event
from patrickstar.report.look import kind_name

TraceEvent = dict[str, Any]
_ENGINE, _COPIES, _TIERS = 1, 2, 10
_THREADS = {"segment": 1, "update": 2, "wait": 3}
_NAMES = {1: "compute", 2: "updates", 3: "waiting"}


def trace_events(events: Iterable[Event], tiers: Iterable[str]) -> Iterator[TraceEvent]:
    """The trace events of a run.

    Args:
        events: of the run, in the order in which they were recorded.
        tiers: their names, fastest first.
    """
    processes = {tier: _TIERS + place for place, tier in enumerate(tiers)}
    yield _named("process_name", _ENGINE, 0, "engine")
    yield _named("process_name", _COPIES, 0, "copies")
    for tier, process in processes.items():
        yield _named("process_name", process, 0, f"{tier} memory")
    for thread, name in _NAMES.items():
        yield _named("thread_name", _ENGINE, thread, name)
    chunks: dict[int, tuple[str, int]] = {}
    lanes = _Lanes()
    for event in events:
        if event.event == "chunk":
            chunks[event.chunk] = (event.kind, event.bytes)
        elif event.event == "iteration":
            planned = {"planned": event.planned}
            yield _instant(f"step {event.step} begins", _ENGINE, 1, event.time, "g", planned)
        elif event.event == "segment":
            yield _complete(event.kind, _ENGINE, _THREADS["segment"], event.begin, event.end, {})
        elif event.event == "update":
            what = {"chunk": event.chunk}
            yield _complete("update", _ENGINE, _THREADS["update"], event.begin, event.end, what)
        elif event.event == "wait":
            yield _complete("wait", _ENGINE, _THREADS["wait"], event.begin, event.end, {})
        elif event.event == "transfer":
            way = f"{event.source} -> {event.target}"
            thread, is_new = lanes.place(way, event.begin, event.end)
            if is_new:
                yield _named("thread_name", _COPIES, thread, way)
            arguments = {"chunk": event.chunk, "bytes": event.bytes, **_about(event.chunk, chunks)}
            name = f"chunk {event.chunk}"
            yield _complete(name, _COPIES, thread, event.begin, event.end, arguments)
        elif event.event == "collective":
            arguments = {"bytes": event.bytes, "chunk": event.chunk}
            thread, is_new = lanes.place("collectives", event.begin, event.end)
            if is_new:
                yield _named("thread_name", _COPIES, thread, "collectives")
            yield _complete(event.name, _COPIES, thread, event.begin, event.end, arguments)
        elif event.event == "left" and event.tier in processes:
            arguments = {"why": event.why, **_about(event.chunk, chunks)}
            name = f"chunk {event.chunk} leaves"
            yield _instant(name, processes[event.tier], 0, event.time, "p", arguments)
        elif event.event == "memory" and event.tier in processes:
            yield {
                "name": f"{event.tier} bytes",
                "ph": "C",
                "pid": processes[event.tier],
                "tid": 0,
                "ts": _microseconds(event.time),
                "args": {kind_name(kind): nbytes for kind, nbytes in event.bytes.items()}
                or {"": 0},
            }


class _Lanes:
    """Puts copies of a way that run at once on threads of their own: spans of a thread nest."""

    def __init__(self) -> None:
        self._busy: list[tuple[str, float]] = []

    def place(self, way: str, begin: float, end: float) -> tuple[int, bool]:
        """The thread of a copy, and whether it is a new one."""
        for thread, (of, until) in enumerate(self._busy):
            if of == way and until <= begin:
                self._busy[thread] = (way, end)
                return thread + 1, False
        self._busy.append((way, end))
        return len(self._busy), True


def _about(chunk: int, chunks: dict[int, tuple[str, int]]) -> dict[str, str]:
    return {"kind": kind_name(chunks[chunk][0])} if chunk in chunks else {}


def _named(what: str, process: int, thread: int, name: str) -> TraceEvent:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _complete(
    name: str, process: int, thread: int, begin: float, end: float, arguments: dict[str, Any]
) -> TraceEvent:
    return {
        "name": name,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": _microseconds(begin),
        "dur": _microseconds(max(end - begin, 0)),
        "args": arguments,
    }


def _instant(
    name: str, process: int, thread: int, at: float, scope: str, arguments: dict[str, Any]
) -> TraceEvent:
    return {
        "name": name,
        "ph": "i",
        "s": scope,
        "pid": process,
        "tid": thread,
        "ts": _microseconds(at),
        "args": arguments,
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
