"""The table of the largest model that each can train on the machine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import table

_HEADS = (
    "",
    "model",
    "state, GiB",
    "peak RSS, GiB",
    "step, s",
    "disk read + written a step, GiB",
    "loss",
)
Result = dict[str, Any]
STATE = 14  # bytes a parameter: bf16 weight, fp32 master, two fp32 moments; without gradients


def _cells(result: Result, row: Result) -> list[str]:
    if not row["runs"]:
        return [row["name"], row["model"], "", "", "", "", f"not trained: {row['not_measured']}"]
    run, warmup = row["runs"][0], result["warmup"]
    read, written = (
        statistics.median(run[key][warmup:]) / 2**30 for key in ("disk_read", "disk_written")
    )
    return [
        row["name"],
        f"{row['model']} ({run['parameters'] / 1e9:.2f}B)",
        f"{STATE * run['parameters'] / 2**30:.1f}",
        f"{run['process']['max_rss'] / 2**30:.1f}",
        f"{statistics.median(run['step_s'][warmup:]):.1f}",
        f"{read:.1f} + {written:.1f}",
        " → ".join(f"{loss:.3f}" for loss in run["losses"]),
    ]


def capacity(result: Result) -> Iterator[str]:
    """Every row, the machine, and the settings that stand under no other table."""
    facts = result["machine"][0]
    yield from table(_HEADS, [_cells(result, row) for row in result["rows"].values()])
    yield ""
    used = [run["process"]["others_cpu"] for row in result["rows"].values() for run in row["runs"]]
    yield (
        f"Machine: {facts['memory_bytes'] / 2**30:.2f} GiB, {facts['cores']} cores, "
        f"{facts['disk_free'] / 2**30:.0f} GiB free on the disk. Measured "
        f"{result['started']}: {result['tokens']} tokens a step, the same in every step, so that "
        f"the loss falls; {result['warmup'] + result['steps']} steps, of which the first does not "
        f"count. Others used {min(used, default=0):.0%} to {max(used, default=0):.0%} of the "
        "processors."
    )
    yield ""
    for row in result["rows"].values():
        if row["options"]:
            yield f"- {row['name']}, {row['model']}: `{json.dumps(row['options'])}`"
