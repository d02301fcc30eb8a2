"""The table and the figure of what a computation hides of the communication beside it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from benchmarks.markdown import table
from benchmarks.parts import NOT_MEASURED, measured_when, parts_of

FIGURE = "images/communication-hidden.svg"
_LEFT, _WIDE, _BAR, _GAP, _TOP = 210, 420, 22, 12, 46
_HIDDEN, _WAITED = "#2b8a5a", "#d9822b"


def hidden(run: dict[str, Any]) -> float:
    """The share of the time that collectives ran for which the computation did not wait."""
    return float(max(0.0, 1 - run["waited_s"] / run["busy_s"]))


def network(result: dict[str, Any]) -> Iterator[str]:
    """What of the communication a computation hides."""
    rows = []
    for answer, why in parts_of(result):
        if answer is None:
            yield f"{NOT_MEASURED} ({why})"
            yield ""
            continue
        rows += [
            [
                answer["rate"],
                str(run["stage"]),
                "beside computing" if run["overlap"] else "waited for",
                f"{run['step_s']:.3f}",
                f"{run['busy_s']:.3f}",
                f"{run['waited_s']:.3f}",
                f"{hidden(run):.0%}",
            ]
            for run in answer["runs"]
        ]
    heads = ("link", "stage", "communication", "step (s)", "sending (s)", "waiting (s)", "hidden")
    yield from table(heads, rows)
    yield ""
    yield from measured_when(result)


def figure(result: dict[str, Any]) -> str:
    """An SVG with a bar for every run: seconds of sending in a step, hidden and waited for."""
    runs = [
        (answer["rate"], run)
        for answer, _ in parts_of(result)
        if answer is not None
        for run in answer["runs"]
    ]
    longest = max((run["busy_s"] for _, run in runs), default=1.0)
    height = _TOP + len(runs) * (_BAR + _GAP) + 8
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDE + 70}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        "<title>Communication of a step: hidden by computing, and waited for</title>",
        f'<rect width="100%" height="{height}" fill="white"/>',
        *_key(_LEFT, "hidden by computing", _HIDDEN),
        *_key(_LEFT + 180, "waited for", _WAITED),
        f'<text x="{_LEFT + 290}" y="22">seconds of a step</text>',
    ]
    for number, (rate, run) in enumerate(runs):
        y, share = _TOP + number * (_BAR + _GAP), hidden(run)
        whole = run["busy_s"] / longest * _WIDE
        way = "beside computing" if run["overlap"] else "waited for"
        drawn += [
            f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">'
            f"{escape(rate)}, stage {run['stage']}, {way}</text>",
            f'<rect x="{_LEFT}" y="{y}" width="{whole:.1f}" height="{_BAR}" fill="{_WAITED}"/>',
            f'<rect x="{_LEFT}" y="{y}" width="{whole * share:.1f}" height="{_BAR}" '
            f'fill="{_HIDDEN}"/>',
            f'<text x="{_LEFT + whole + 6:.1f}" y="{y + 16}">{run["busy_s"]:.2f} s, {share:.0%}'
            "</text>",
        ]
    return "\n".join([*drawn, "</svg>", ""])


def _key(x: int, text: str, colour: str) -> tuple[str, str]:
    return (
        f'<rect x="{x}" y="11" width="13" height="13" fill="{colour}"/>',
        f'<text x="{x + 19}" y="22">{text}</text>',
    )
