"""What all figures have in common: colours, axes, and texts that are safe to show.

A figure is a plain dict in Plotly's form. Background, text and grid get their colours in the
browser, where it is known whether it is light or dark; the colours here go with both.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

Figure = dict[str, Any]

# Kinds of content, from the bottom of a stack to its top.
KINDS = {
    "parameter": ("parameters", "#4c78a8"),
    "master": ("master weights", "#54a24b"),
    "moments": ("moments", "#b279a2"),
    "gradient": ("gradients", "#f58518"),
    "construction": ("under construction", "#9d755d"),
    "activations": ("activations", "#e8b92f"),
    "other": ("other", "#9a9aa2"),
}
BUDGET = "#e04f4f"
LINE = "#4c78a8"
SECOND = "#f58518"
TIERS = ("#e45756", "#4c78a8", "#8a8a94", "#54a24b")  # slowest last
WAYS = ("#4c78a8", "#54a24b", "#b279a2", "#f58518", "#72b7b2", "#9d755d")
SEGMENTS = {"forward": "#4c78a8", "backward": "#7a5fa8", "step": "#54a24b", "evaluation": "#72b7b2"}
FAINT = "#9a9aa2"


def shown(text: str, most: int = 120) -> str:
    """`text` for Plotly, which takes some HTML in labels: none of it is left."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return html.escape("".join(c if c.isprintable() else "�" for c in cut))


def kind_name(kind: str) -> str:
    return KINDS[kind][0] if kind in KINDS else shown(kind, 40)


def kind_colour(kind: str) -> str:
    return KINDS[kind][1] if kind in KINDS else FAINT


def tier_colour(tier: str, tiers: Sequence[str]) -> str:
    """By what the tier is called, so that the host is the same colour with and without a device."""
    names = {"device": 0, "host": 1, "disk": 2}
    place = names.get(tier, list(tiers).index(tier) if tier in tiers else 0)
    return TIERS[place % len(TIERS)]


def mib(nbytes: float) -> float:
    return round(nbytes / 2**20, 4)


def budget_line(budget: int) -> Figure:
    """A shape across the plot at `budget` bytes of a tier."""
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": mib(budget),
        "y1": mib(budget),
        "line": {"color": BUDGET, "width": 2, "dash": "dash"},
    }


def figure(traces: Sequence[Mapping[str, Any]], height: int, **layout: Any) -> Figure:
    """A figure of `traces`; `layout` is added to what all have."""
    common: dict[str, Any] = {
        "height": height,
        "margin": {"l": 60, "r": 16, "t": 34, "b": 44},
        "hovermode": "closest",
        "dragmode": "zoom",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
        "xaxis": {"automargin": True},
        "yaxis": {"automargin": True},
    }
    for key, value in layout.items():
        before = common.get(key)
        common[key] = {**before, **value} if isinstance(before, dict) else value
    return {"data": list(traces), "layout": common}
