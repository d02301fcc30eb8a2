"""Which chunk lived where, when, and why it left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from patrickstar.memory.sizes import format_bytes
from patrickstar.report.format import Event, Weights
from patrickstar.report.look import KINDS, Figure, figure, kind_name, shown, tier_colour

MOST_CHUNKS, MOST_STAYS = 400, 8000
REASONS = {
    "plan": "the plan lets it leave",
    "room": "something else needed the room",
    "asked": "the caller asked",
    "written": "it was written elsewhere, so this copy was stale",
    "released": "nobody needs the contents any more",
    "failed": "the copy could not be completed",
}
_STILL = "still there at the end"


@dataclass(frozen=True)
class Stay:
    """A copy of `chunk` on `tier`, in seconds of the step; `why` it left, or None."""

    chunk: int
    tier: str
    begin: float
    end: float
    why: str | None


def stays(events: Sequence[Event]) -> list[Stay]:
    """Every stay of every chunk, in the order in which they end."""
    if not events:
        return []
    start, over = events[0].time, max(event.time for event in events)
    here: dict[tuple[int, str], float] = {}
    found: list[Stay] = []
    for event in events:
        if event.event == "resident":
            here.setdefault((event.chunk, event.tier), start)
        elif event.event == "placed":
            here.setdefault((event.chunk, event.tier), event.time)
        elif event.event == "left":
            began = here.pop((event.chunk, event.tier), start)
            found.append(Stay(event.chunk, event.tier, began, event.time, event.why))
    found += [Stay(chunk, tier, began, over, None) for (chunk, tier), began in here.items()]
    return [
        Stay(
            s.chunk, s.tier, round(s.begin - start, 6), round(max(s.end, s.begin) - start, 6), s.why
        )
        for s in found
    ]


def chosen(
    found: Sequence[Stay], most: int = MOST_CHUNKS, stays_most: int = MOST_STAYS
) -> set[int]:
    """The chunks that are drawn: all of them, or of too many those that moved most often."""
    counts: dict[int, int] = {}
    for stay in found:
        counts[stay.chunk] = counts.get(stay.chunk, 0) + 1
    taken: set[int] = set()
    room = stays_most
    for chunk in sorted(counts, key=lambda chunk: (-counts[chunk], chunk))[:most]:
        room -= counts[chunk]
        if room < 0 and taken:
            break
        taken.add(chunk)
    return taken


def chunk_map_figure(
    events: Sequence[Event],
    chunks: Mapping[int, tuple[str, int]],
    weights: Sequence[Weights],
    tiers: Sequence[str],
) -> tuple[Figure, int, int] | None:
    """The map, how many chunks are in it, and of how many; None if nothing was anywhere."""
    found = stays(events)
    if not found:
        return None
    everything = {stay.chunk for stay in found}
    drawn = chosen(found)
    order = {kind: place for place, kind in enumerate(KINDS)}
    rows = sorted(drawn, key=lambda c: (order.get(_kind(c, chunks), len(order)), c))
    labels = {chunk: f"{chunk} {kind_name(_kind(chunk, chunks))}" for chunk in rows}
    contents = _contents(weights)
    traces: list[dict[str, Any]] = []
    for depth, tier in enumerate(reversed(tiers)):  # the slowest is drawn first, and widest
        here = [stay for stay in found if stay.tier == tier and stay.chunk in drawn]
        if not here:
            continue
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": shown(tier, 20),
                "y": [labels[stay.chunk] for stay in here],
                "base": [stay.begin for stay in here],
                "x": [max(stay.end - stay.begin, 1e-6) for stay in here],
                "width": max(0.9 - 0.25 * depth, 0.2),
                "marker": {"color": tier_colour(tier, tiers), "line": {"width": 0}},
                "customdata": [
                    [
                        _about(stay.chunk, chunks, contents),
                        _STILL
                        if stay.why is None
                        else f"left: {REASONS.get(stay.why, shown(stay.why, 40))}",
                        stay.end,
                    ]
                    for stay in here
                ],
                "hovertemplate": "%{customdata[0]}<br>on %{fullData.name} from %{base:.4f} to "
                "%{customdata[2]:.4f} s<br>%{customdata[1]}<extra></extra>",
            }
        )
    left = [s for s in found if s.chunk in drawn and s.why == "room"]
    if left:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "left for lack of room",
                "x": [stay.end for stay in left],
                "y": [labels[stay.chunk] for stay in left],
                "marker": {"symbol": "x-thin", "size": 7, "line": {"width": 2, "color": "#e8b92f"}},
                "hovertemplate": "%{y} left for lack of room at %{x:.4f} s<extra></extra>",
            }
        )
    height = min(max(200 + 5 * len(rows), 320), 1400)
    shown_map = figure(
        traces,
        height,
        barmode="overlay",
        xaxis={
            "title": {"text": "seconds of the step"},
            "range": [0, max(1e-6, *(stay.end for stay in found))],
        },
        yaxis={
            "type": "category",
            "categoryorder": "array",
            "categoryarray": list(labels.values()),
            "autorange": "reversed",
            "tickfont": {"size": 10},
        },
        bargap=0,
    )
    return shown_map, len(drawn), len(everything)


def _kind(chunk: int, chunks: Mapping[int, tuple[str, int]]) -> str:
    return chunks[chunk][0] if chunk in chunks else "unknown"


def _contents(weights: Sequence[Weights]) -> dict[int, str]:
    found: dict[int, str] = {}
    for entry in weights:
        names = ", ".join(shown(name, 60) for name in entry.names[:3])
        more = entry.count - min(len(entry.names), 3)
        text = names + (f" and {more} more" if names and more > 0 else "")
        for chunk in entry.chunks:
            found[chunk] = text
    return found


def _about(chunk: int, chunks: Mapping[int, tuple[str, int]], contents: Mapping[int, str]) -> str:
    kind, nbytes = chunks.get(chunk, ("unknown", 0))
    lines = [f"chunk {chunk}, {kind_name(kind)}, {format_bytes(nbytes)}"]
    if contents.get(chunk):
        lines.append(contents[chunk])
    return "<br>".join(lines)
