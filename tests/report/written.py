"""Run folders written by hand, line by line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {"step": number, "loss": 1.0, "step_time_s": 0.5, **changes}


def events(step: int = 1, *, complete: bool = True, plan: int | None = None) -> list[Line]:
    """A step of two seconds: chunk 1 comes from the disk, a forward waits for it, 0 makes room."""
    return [
        {"event": "iteration", "time": 10.0, "step": step, "planned": True, "plan": plan},
        {"event": "chunk", "time": 10.0, "chunk": 0, "kind": "parameter", "bytes": 100},
        {"event": "chunk", "time": 10.0, "chunk": 1, "kind": "moments", "bytes": 200},
        {"event": "resident", "time": 10.1, "chunk": 0, "tier": "host"},
        {"event": "resident", "time": 10.1, "chunk": 1, "tier": "disk"},
        {"event": "memory", "time": 10.1, "tier": "host", "bytes": {"parameter": 100, "other": 7}},
        {"event": "moment", "time": 10.2, "uses": [[0, "read", "host"]]},
        {"event": "placed", "time": 10.4, "chunk": 1, "tier": "host"},
        {
            "event": "transfer",
            "time": 11.0,
            "chunk": 1,
            "source": "disk",
            "target": "host",
            "bytes": 200,
            "begin": 10.4,
            "end": 11.0,
        },
        {"event": "wait", "time": 11.0, "begin": 10.8, "end": 11.0},
        {
            "event": "memory",
            "time": 11.0,
            "tier": "host",
            "bytes": {"parameter": 100, "moments": 200, "other": 57},
        },
        {"event": "moment", "time": 11.0, "uses": [[1, "update", "host"]]},
        {"event": "left", "time": 11.1, "chunk": 0, "tier": "host", "why": "room"},
        {"event": "update", "time": 11.3, "chunk": 0, "begin": 11.2, "end": 11.3},
        {"event": "segment", "time": 11.5, "kind": "forward", "begin": 10.2, "end": 11.5},
        {"event": "memory", "time": 12.0, "tier": "host", "bytes": {"moments": 200, "other": 7}},
        {"event": "end", "time": 12.0, "step": step, "complete": complete},
    ]


def write(
    folder: Path,
    steps: Iterable[Line] = (),
    happened: Iterable[Line] = (),
    plans: Iterable[Line] = (),
    **facts: Any,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tiers = [{"name": "host", "budget": 400}, {"name": "disk", "budget": None}]
    (folder / "facts.json").write_text(json.dumps({"format": 1, "tiers": tiers, **facts}))
    (folder / "steps.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in happened))
    (folder / "plan.json").write_text(json.dumps({"format": 1, "plans": list(plans)}))
    return folder
