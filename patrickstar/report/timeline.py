"""One step over time: what computed, was copied and waited, and how much of it overlapped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from patrickstar.memory.sizes import format_bytes
from patrickstar.report.format import Event
from patrickstar.report.look import BUDGET, FAINT, SEGMENTS, WAYS, Figure, figure, kind_name, shown

MOST = 3000  # bars of a row; nearer ones are drawn as one
_PARTS = "compute"
_WAITS = "waiting"
_UPDATES = "updates"
_COLLECTIVES = "collectives"
_AGAIN = "\u200b"  # ends the names of further rows of a way


@dataclass(frozen=True)
class Span:
    """From `begin` to `end`, in seconds of the step.

    Attributes:
        count: how many spans it stands for.
        gaps: seconds of it that are between them.
    """

    begin: float
    end: float
    kind: str = ""
    text: str = ""
    count: int = 1
    gaps: float = 0.0

    @property
    def filled(self) -> float:
        """The share of it that is no gap."""
        return 1 - self.gaps / (self.end - self.begin) if self.end > self.begin else 1.0


@dataclass(frozen=True)
class Overlap:
    """Seconds of a step: how long it was, and what the time was spent on.

    Attributes:
        whole: between its begin and its end.
        waiting: the processor stood still for a transfer or a collective.
        copying: at least one transfer ran.
        beside: of `copying`, while nobody waited.
        sending: at least one collective ran.
        sending_beside: of `sending`, while nobody waited.
    """

    whole: float
    waiting: float
    copying: float
    beside: float
    sending: float = 0.0
    sending_beside: float = 0.0


def rows(events: Sequence[Event], chunks: Mapping[int, tuple[str, int]]) -> dict[str, list[Span]]:
    """Spans by row, in the order in which rows are shown.

    Transfers have a row for each way and, where several run at once, several; no two spans of a row
    overlap.
    """
    start = events[0].time if events else 0.0
    segments: list[Span] = []
    waits: list[Span] = []
    updates: list[Span] = []
    collectives: list[Span] = []
    ways: dict[str, list[Span]] = {}
    for event in events:
        if event.event == "segment":
            segments.append(_span(event.begin, event.end, start, event.kind, event.kind))
        elif event.event == "wait":
            waits.append(_span(event.begin, event.end, start, "wait", "waits"))
        elif event.event == "update":
            what = f"update of chunk {event.chunk}"
            updates.append(_span(event.begin, event.end, start, "update", what))
        elif event.event == "transfer":
            seconds = event.end - event.begin
            rate = f", {format_bytes(round(event.bytes / seconds))}/s" if seconds > 0 else ""
            kind = kind_name(chunks[event.chunk][0]) if event.chunk in chunks else ""
            what = f"chunk {event.chunk} {kind}, {format_bytes(event.bytes)}{rate}"
            way = f"{event.source} → {event.target}"
            ways.setdefault(way, []).append(_span(event.begin, event.end, start, way, what))
        elif event.event == "collective":
            what = f"{event.name} of {event.chunk}, {format_bytes(event.bytes)}"
            collectives.append(_span(event.begin, event.end, start, event.name, what))
    found = {_PARTS: segments, _UPDATES: updates, _WAITS: waits}
    for number, lane in enumerate(_lanes(collectives)):
        found[_COLLECTIVES + _AGAIN * number] = lane
    for way, spans in sorted(ways.items()):
        for number, lane in enumerate(_lanes(spans)):
            found[way + _AGAIN * number] = lane
    return {name: spans for name, spans in found.items() if spans}


def overlap(events: Sequence[Event]) -> Overlap:
    """How much of the copying happened while the processor did something else than wait."""
    if not events:
        return Overlap(0, 0, 0, 0)
    waits = union((e.begin, e.end) for e in events if e.event == "wait")
    copies = union((e.begin, e.end) for e in events if e.event == "transfer")
    sends = union((e.begin, e.end) for e in events if e.event == "collective")
    whole = events[-1].time - events[0].time
    found = [whole, length(waits)]
    for spans in (copies, sends):
        alone = length(union([*spans, *waits])) - length(waits)
        found += [length(spans), alone]
    return Overlap(*found)


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time without overlaps, in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def coalesced(spans: Sequence[Span], most: int = MOST) -> list[Span]:
    """At most about `most` spans: if there are more, those that are too near to be told apart, or
    lie over each other, are one.
    """
    ordered = sorted(spans, key=lambda span: span.begin)
    if len(ordered) <= most:
        return ordered
    nearest = (max(span.end for span in ordered) - ordered[0].begin) / most
    found: list[Span] = []
    for span in ordered:
        last = found[-1] if found and found[-1].kind == span.kind else None
        if last is not None and (span.end - last.begin <= nearest or span.begin < last.end):
            count = last.count + span.count
            merged = replace(
                last,
                end=max(last.end, span.end),
                count=count,
                gaps=last.gaps + max(span.begin - last.end, 0.0),
            )
            text = f"{count} together, {merged.filled:.0%} of the time"
            found[-1] = replace(merged, text=text)
        else:
            found.append(span)
    return found


def timeline_figure(
    events: Sequence[Event], chunks: Mapping[int, tuple[str, int]]
) -> Figure | None:
    """The rows of a step over its seconds; None if nothing has a time."""
    found = rows(events, chunks)
    if not found:
        return None
    names = {
        name: _label(name.rstrip(_AGAIN), len(name) - len(name.rstrip(_AGAIN)), found)
        for name in found
    }
    end = max(1e-6, *(span.end for spans in found.values() for span in spans))
    colours: dict[str, str] = {}
    traces = []
    for name, spans in found.items():
        drawn = coalesced(spans)
        way = name.rstrip(_AGAIN)
        if name not in (_PARTS, _WAITS, _UPDATES):
            colours.setdefault(way, WAYS[len(colours) % len(WAYS)])
        one = {_WAITS: BUDGET, _UPDATES: SEGMENTS["step"]}.get(name, colours.get(way, FAINT))
        colour = [SEGMENTS.get(s.kind, FAINT) for s in drawn] if name == _PARTS else one
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "base": [span.begin for span in drawn],
                "x": [max(span.end - span.begin, 1e-6) for span in drawn],
                "y": [names[name]] * len(drawn),
                "width": 0.82,
                "marker": {
                    "color": colour,
                    "opacity": [round(max(span.filled, 0.1), 2) for span in drawn],
                    "line": {"width": 0},
                },
                "customdata": [
                    [shown(s.text), round((s.end - s.begin) * 1e3, 3), s.begin, s.end]
                    for s in drawn
                ],
                "hovertemplate": "%{customdata[0]}<br>%{customdata[1]:,.2f} ms, from "
                "%{customdata[2]:.4f} to %{customdata[3]:.4f} s<extra></extra>",
                "text": [shown(s.text, 20) for s in drawn] if name == _PARTS else None,
                "textposition": "inside" if name == _PARTS else "none",
                "insidetextanchor": "middle",
                "textangle": 0,
                "name": shown(way, 40),
                "showlegend": False,
            }
        )
    return figure(
        traces,
        90 + 34 * len(found),
        barmode="overlay",
        uniformtext={"minsize": 9, "mode": "hide"},
        xaxis={"title": {"text": "seconds of the step"}, "range": [0, end]},
        yaxis={
            "autorange": "reversed",
            "type": "category",
            "categoryorder": "array",
            "categoryarray": list(names.values()),
            "fixedrange": True,
        },
        margin={"t": 10},
    )


def _label(way: str, lane: int, found: Mapping[str, list[Span]]) -> str:
    """The name of a row; where several of a way run at once, with its number."""
    return shown(way, 40) + (f" {lane + 1}" if way + _AGAIN in found else "")


def _span(begin: float, end: float, start: float, kind: str, text: str) -> Span:
    return Span(round(begin - start, 6), round(max(end, begin) - start, 6), kind, text)


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        for lane in lanes:
            if lane[-1].end <= span.begin:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes
