"""The trace-event export, checked against what the format says."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from patrickstar.report import read_run, trace_events
from patrickstar.report.run import iterate_events

# Google's "Trace Event Format": the phases used here, and the fields that each must have.
FIELDS = {
    "M": {"name", "ph", "pid", "tid", "args"},
    "X": {"name", "ph", "pid", "tid", "ts", "dur", "args"},
    "i": {"name", "ph", "pid", "tid", "ts", "s", "args"},
    "C": {"name", "ph", "pid", "tid", "ts", "args"},
}


@pytest.fixture(scope="module")
def trace(recorded: Path) -> list[dict[str, Any]]:
    return list(trace_events(iterate_events(recorded), read_run(recorded).budgets))


def test_every_event_has_the_fields_of_its_phase(trace: list[dict[str, Any]]) -> None:
    assert {event["ph"] for event in trace} == set(FIELDS)
    for event in trace:
        assert set(event) == FIELDS[event["ph"]]
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is type(event["tid"]) is int
        if "ts" in event:
            assert event["ts"] >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert event["args"] and all(type(value) is int for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in {"g", "p", "t"}
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name"}
            assert isinstance(event["args"]["name"], str)


def test_every_process_and_thread_with_spans_has_a_name(trace: list[dict[str, Any]]) -> None:
    named = {(e["pid"], e["tid"]) for e in trace if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in trace if e["ph"] == "X"} <= named
    processes = {e["pid"] for e in trace if e["name"] == "process_name"}
    assert {e["pid"] for e in trace} <= processes


def test_spans_of_a_thread_nest(trace: list[dict[str, Any]]) -> None:
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            threads[event["pid"], event["tid"]].append(span)
    for spans in threads.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        for before, after in itertools.pairwise(spans):
            assert after[0] >= before[1] - 0.002 or after[1] <= before[1]


def test_all_recorded_steps_and_copies_are_there(
    recorded: Path, trace: list[dict[str, Any]]
) -> None:
    begins = [e["name"] for e in trace if e["ph"] == "i" and e["pid"] == 1]
    assert begins == [f"step {n} begins" for n in (1, 2, 3, 4)]
    copied = sum(e["args"]["bytes"] for e in trace if e["ph"] == "X" and "bytes" in e["args"])
    assert copied == sum(e.bytes for e in iterate_events(recorded) if e.event == "transfer") > 0
