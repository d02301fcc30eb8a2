"""The memory of every tier over the moments of a step, stacked by kind, against the budget.

The recording has the largest use of a tier at every moment. Memory that no chunk owns is split: as
much of it as is there at every moment of the step is "other" (buffers, batches); what comes and
goes above it is "activations" (and what operators work with).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from patrickstar.memory.sizes import format_bytes
from patrickstar.report.format import Event
from patrickstar.report.look import (
    BUDGET,
    KINDS,
    Figure,
    budget_line,
    figure,
    kind_colour,
    kind_name,
    mib,
    shown,
)

MOST = 1200  # moments that are drawn; of more, each point is the fullest of several
_ANNOTATED = 40


@dataclass(frozen=True)
class Level:
    """The largest use of a tier in one moment: bytes by kind, at `time` seconds."""

    moment: int
    time: float
    used: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.used.values())


def levels(events: Iterable[Event], tier: str) -> list[Level]:
    """The uses of `tier`, moment by moment; what came before the first moment counts to it."""
    fullest: dict[int, tuple[float, dict[str, int]]] = {}
    always: int | None = None
    begun = 0
    for event in events:
        if event.event == "moment":
            begun += 1
        elif event.event == "memory" and event.tier == tier:
            # What a moment used at most is noted when the next one begins.
            moment, used = max(begun - 1, 0), dict(event.bytes)
            other = used.get("other", 0)
            always = other if always is None else min(always, other)
            if moment not in fullest or sum(used.values()) > sum(fullest[moment][1].values()):
                fullest[moment] = event.time, used
    found: list[Level] = []
    for moment, (time, used) in sorted(fullest.items()):
        other = used.pop("other", 0)
        split = {"activations": other - (always or 0), "other": always or 0}
        found.append(Level(moment, time, used | {kind: n for kind, n in split.items() if n}))
    return found


def thinned(all_levels: Sequence[Level], most: int = MOST) -> list[Level]:
    """At most `most` levels: of neighbours, the fullest."""
    width = -(-len(all_levels) // most) if all_levels else 1
    groups = (all_levels[start : start + width] for start in range(0, len(all_levels), width))
    return [max(group, key=lambda level: level.total) for group in groups]


def segments_by_moment(events: Sequence[Event]) -> list[tuple[str, int, int]]:
    """The parts of the step as `(kind, first moment, moment after the last)`."""
    times = [event.time for event in events if event.event == "moment"]
    found: list[tuple[str, int, int]] = []
    for event in events:
        if event.event == "segment":
            first = sum(time < event.begin for time in times)
            last = sum(time <= event.end for time in times)
            found.append((event.kind, first, last))
    return found


def memory_figure(events: Sequence[Event], tier: str, budget: int | None) -> Figure | None:
    """One tier; None if nothing is known of it or nothing was ever there."""
    found = thinned(levels(events, tier))
    if not found or not any(level.total for level in found):
        return None
    there = {kind for level in found for kind in level.used}
    kinds = [kind for kind in KINDS if kind in there] + sorted(there - set(KINDS))
    x = [level.moment for level in found]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "memory",
            "x": x,
            "y": [mib(level.used.get(kind, 0)) for level in found],
            "name": kind_name(kind),
            "line": {"width": 0.5, "color": kind_colour(kind), "shape": "hv"},
            "fillcolor": kind_colour(kind),
            "hovertemplate": "%{y:,.2f} MiB",
        }
        for kind in kinds
    ]
    peak = max(found, key=lambda level: level.total)
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": [peak.moment],
            "y": [mib(peak.total)],
            "marker": {"size": 8, "color": BUDGET, "symbol": "circle-open", "line": {"width": 2}},
            "name": "peak",
            "hovertemplate": "%{y:,.2f} MiB",
        }
    )
    top = mib(max(peak.total, budget or 0)) or 1
    label = f"peak {format_bytes(peak.total)}"
    lines = []
    if budget is not None:
        label += f", budget {format_bytes(budget)}"
        lines.append(budget_line(budget))
    notes: list[Figure] = [
        {
            "xref": "paper",
            "x": 1,
            "xanchor": "right",
            "yref": "y",
            "y": top,
            "yanchor": "bottom",
            "text": label,
            "font": {"color": BUDGET},
            "showarrow": False,
        }
    ]
    parts = segments_by_moment(events)
    if len(parts) <= _ANNOTATED:
        for kind, first, last in parts:
            lines.append(
                {
                    "type": "line",
                    "yref": "paper",
                    "y0": 0,
                    "y1": 1,
                    "x0": first,
                    "x1": first,
                    "line": {"color": "rgba(140,140,150,0.6)", "width": 1, "dash": "dot"},
                }
            )
            if (last - first) * 12 >= x[-1]:  # wide enough for a word
                notes.append(
                    {
                        "x": (first + last) / 2,
                        "yref": "paper",
                        "y": 0.01,
                        "yanchor": "bottom",
                        "text": shown(kind, 20),
                        "font": {"color": "#ffffff"},
                        "bgcolor": "rgba(30,34,44,0.62)",
                        "showarrow": False,
                    }
                )
    return figure(
        traces,
        400,
        xaxis={"title": {"text": "moment of the step"}, "range": [0, max(x[-1], 1)]},
        yaxis={"title": {"text": f"{shown(tier, 20)}, MiB"}, "range": [0, top * 1.12]},
        hovermode="x unified",
        shapes=lines,
        annotations=notes,
        legend={"traceorder": "normal"},
    )
