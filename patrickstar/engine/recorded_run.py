"""A run that is recorded into a folder: the recording, the files, and what the engine adds."""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from patrickstar.engine.recording import Event, Recording
from patrickstar.engine.run_folder import RunFolder
from patrickstar.memory import Plan, Tier


class RecordedRun:
    """Records one run; handed to what it watches.

    Args:
        path: the run folder.
        tiers: of the run, fastest first.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(self, path: Path, tiers: Sequence[Tier]) -> None:
        self._folder = RunFolder(path)
        self._tiers = [(tier.name, tier.capacity) for tier in tiers]
        self.recording = Recording([name for name, _ in self._tiers], self)

    def begin(self, facts: Mapping[str, Any]) -> None:
        """The run is set up; `facts` are what its maker knows of it."""
        self._folder.facts(
            {
                "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "tiers": [{"name": name, "budget": budget} for name, budget in self._tiers],
                "machine": {
                    "system": platform.platform(),
                    "cores": os.cpu_count(),
                    "threads": torch.get_num_threads(),
                },
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "patrickstar": _version(),
                },
                **facts,
            }
        )

    def follow(self, engine: Any) -> None:
        """Take the learning rate and the gradient norm of a step from `engine`."""
        self.recording.details = _details(weakref.ref(engine))

    def events(self, events: Sequence[Event]) -> None:
        self._folder.events(events)

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._folder.step(metrics)

    def plan(self, plan: Plan) -> None:
        self._folder.plan(plan, [name for name, _ in self._tiers])

    def close(self) -> None:
        self._folder.close()


def _details(engine: weakref.ref[Any]) -> Callable[[], dict[str, Any]]:
    def of_step() -> dict[str, Any]:
        alive = engine()
        if alive is None:
            return {}
        return {"lr": alive.get_lr()[0], "grad_norm": alive.get_global_grad_norm()}

    return of_step


def _version() -> str:
    try:
        return metadata.version("patrickstar")
    except metadata.PackageNotFoundError:
        return "source tree"
