"""The files that a recorded run leaves in its folder, for `patrickstar report`.

    facts.json      the run: versions, machine, tiers and their budgets, size of the model
    plan.json       what the planner expects of an iteration, of each plan that was followed
    steps.jsonl     a line an optimizer step
    events.jsonl    a line an event, of some steps (see `patrickstar.engine.recording`)

Files are replaced when a run begins in a folder that has them. A line is written whole or, when the
process is killed, not to its end; who reads them expects that of the last one.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from patrickstar.engine.recording import Event
from patrickstar.errors import ConfigError
from patrickstar.memory import Plan

FORMAT = 1


class RunFolder:
    """Writes a run into `path`, which is made if need be.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._plans: list[dict[str, Any]] = []
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "plan.json").unlink(missing_ok=True)
            self._steps = (path / "steps.jsonl").open("wb", buffering=0)
            self._events = (path / "events.jsonl").open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"the run folder {str(path)!r} cannot be written ({error.strerror}); choose "
                "another with patrickstar.record (--record)"
            ) from error

    def facts(self, facts: Mapping[str, Any]) -> None:
        """What is known when the run begins."""
        self._replace("facts.json", {"format": FORMAT, **facts})

    def plan(self, plan: Plan, tiers: Sequence[str]) -> None:
        """What the planner expects of the iterations that follow it."""
        self._plans.append(
            {
                "moments": len(plan.trace.moments),
                "tiers": {
                    tiers[tier]: {
                        "peak": plan.peak[tier],
                        "smallest": plan.smallest[tier],
                        "loaded": plan.loaded[tier],
                        "saved": plan.saved[tier],
                        "in_use": plan.in_use[tier],
                    }
                    for tier in plan.peak
                },
            }
        )
        self._replace("plan.json", {"format": FORMAT, "plans": self._plans})

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._append(self._steps, [metrics])

    def events(self, events: Sequence[Event]) -> None:
        self._append(self._events, events)

    def close(self) -> None:
        self._steps.close()
        self._events.close()

    def _replace(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(_finite(content), allow_nan=False)
        # Private, and under a name that nobody can have put a link at.
        file, beside = tempfile.mkstemp(prefix=f".{name}.", dir=self.path)
        with os.fdopen(file, "w") as out:
            out.write(text)
        os.replace(beside, self.path / name)

    def _append(self, file: BinaryIO, lines: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(_finite(line), allow_nan=False) + "\n" for line in lines)
        data = text.encode()
        while data:
            data = data[file.write(data) :]


def _finite(value: Any) -> Any:
    """`value` with what JSON has no number for as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
