"""What the plan expected of a step, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from patrickstar.report.format import Event, Plan
from patrickstar.report.look import LINE, SECOND, Figure, budget_line, figure, mib, shown
from patrickstar.report.memory import levels

MOST = 1200  # moments that are drawn


@dataclass(frozen=True)
class Compared:
    """A number of bytes that was planned and what was measured."""

    what: str
    planned: int
    measured: int

    @property
    def difference(self) -> float | None:
        """Of the measured from the planned, as a share of the planned."""
        return (self.measured - self.planned) / self.planned if self.planned else None


def compared(events: Sequence[Event], plan: Plan, tiers: Sequence[str]) -> list[Compared]:
    """Peak use of every planned tier, and bytes that came to it and left it."""
    found: list[Compared] = []
    for place, tier in enumerate(tiers):
        expected = plan.tiers.get(tier)
        if expected is None:
            continue
        peak = max((level.total for level in levels(events, tier)), default=0)
        found.append(Compared(f"peak on the {tier}", expected.peak, peak))
        below = tiers[place + 1] if place + 1 < len(tiers) else None
        if below is not None:
            came, went = _moved(events, below, tier), _moved(events, tier, below)
            found.append(Compared(f"{below} → {tier}", expected.loaded, came))
            found.append(Compared(f"{tier} → {below}", expected.saved, went))
    return found


def _moved(events: Sequence[Event], source: str, target: str) -> int:
    return sum(
        event.bytes
        for event in events
        if event.event == "transfer" and (event.source, event.target) == (source, target)
    )


def reality_figure(
    events: Sequence[Event], plan: Plan, budgets: Mapping[str, int | None]
) -> Figure | None:
    """The first planned tier: bytes in use by plan and in fact at every moment."""
    tier = next((name for name in budgets if name in plan.tiers), None)
    if tier is None or not plan.tiers[tier].in_use:
        return None
    planned = plan.tiers[tier].in_use
    measured = [level.total for level in levels(events, tier)]
    width = -(-max(len(planned), len(measured), 1) // MOST)
    traces = [
        _line(planned, width, "planned", SECOND, "dot"),
        _line(measured, width, "measured", LINE, "solid"),
    ]
    budget = budgets[tier]
    return figure(
        traces,
        340,
        xaxis={"title": {"text": "moment of the step"}},
        yaxis={"title": {"text": f"{shown(tier, 20)}, MiB"}, "rangemode": "tozero"},
        hovermode="x unified",
        shapes=[] if budget is None else [budget_line(budget)],
    )


def _line(values: Sequence[int], width: int, name: str, colour: str, dash: str) -> Figure:
    starts = range(0, len(values), width)
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(starts),
        "y": [mib(max(values[start : start + width])) for start in starts],
        "name": name,
        "line": {"color": colour, "width": 2, "dash": dash, "shape": "hv"},
        "hovertemplate": "%{y:,.2f} MiB",
    }
