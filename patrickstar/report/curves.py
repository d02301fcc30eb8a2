"""Loss, speed and learning rate over the steps of a run."""

from __future__ import annotations

from typing import Any

from patrickstar.report.look import LINE, SECOND, Figure, figure
from patrickstar.report.series import Series

_FAINT = "rgba(76,120,168,0.22)"


def loss_curve(series: Series) -> Figure | None:
    """The loss by step; where steps share a point, their range is shaded. None without losses."""
    steps, buckets = series.points("loss")
    if not steps:
        return None
    traces: list[dict[str, Any]] = []
    if series.width > 1:
        edges = [bucket.high for bucket in buckets] + [bucket.low for bucket in reversed(buckets)]
        traces.append(
            {
                "type": "scatter",
                "x": steps + steps[::-1],
                "y": edges,
                "fill": "toself",
                "fillcolor": _FAINT,
                "line": {"width": 0},
                "hoverinfo": "skip",
                "name": "lowest to highest",
            }
        )
    traces.append(_line(steps, [bucket.mean for bucket in buckets], "loss", LINE))
    return figure(
        traces,
        320,
        xaxis={"title": {"text": "step"}},
        yaxis={"title": {"text": "loss", "standoff": 12}},
        hovermode="x unified",
        showlegend=series.width > 1,
    )


def speed_curve(series: Series) -> Figure | None:
    """Tokens a second if they were counted, seconds a step otherwise."""
    name, title = ("tokens_per_s", "tokens/s")
    steps, buckets = series.points(name)
    if not steps:
        name, title = "step_time_s", "seconds a step"
        steps, buckets = series.points(name)
    if not steps:
        return None
    return _curve(steps, [bucket.mean for bucket in buckets], title, LINE, 320)


def rate_curve(series: Series) -> Figure | None:
    """The learning rate by step; None where none was noted."""
    steps, rates = series.points("lr")
    if not steps:
        return None
    return _curve(
        steps, [rate.mean for rate in rates], "learning rate", SECOND, 220, exponentformat="e"
    )


def _curve(
    x: list[int], y: list[float], title: str, colour: str, height: int, **axis: Any
) -> Figure:
    return figure(
        [_line(x, y, title, colour)],
        height,
        xaxis={"title": {"text": "step"}},
        yaxis={"title": {"text": title, "standoff": 12}, "rangemode": "tozero", **axis},
        hovermode="x unified",
        showlegend=False,
    )


def _line(x: list[int], y: list[float], name: str, colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 60 else "lines",
        "marker": {"size": 4},
        "x": x,
        "y": [float(f"{value:.6g}") for value in y],
        "name": name,
        "line": {"color": colour, "width": 2},
        "hovertemplate": "%{y:.5~g}",
    }
