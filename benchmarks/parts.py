"""What the tables share that a program of their own measures, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NOT_MEASURED = "not measured"
Result = dict[str, Any]


def parts_of(result: Result) -> Iterator[tuple[Result | None, str]]:
    """The answers of a script's parts; where there is none, why."""
    for part in result["parts"]:
        yield part.get("answer"), part["not_measured"] or ""


def measured_when(result: Result) -> Iterator[str]:
    """When the parts were measured, and what others took of the processors; nothing if none was."""
    used = [part["process"]["others_cpu"] for part in result["parts"] if "process" in part]
    if used:
        yield f"Measured {result['started']}; others used {max(used):.0%} of the processors."
