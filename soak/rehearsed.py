"""The run of a trial on paper: nothing is allocated or timed."""

from __future__ import annotations

import json
from typing import Any

import torch

from patrickstar.config import load_config
from patrickstar.engine.from_config import settings_from
from patrickstar.engine.initialize import RunSettings
from patrickstar.planning import rehearse_run
from patrickstar.planning.rehearsed import Rehearsed
from soak.models import Spec


def rehearsed(spec: Spec, config: dict[str, Any]) -> tuple[Rehearsed, RunSettings]:
    """One iteration of `spec`, as a run with `config` would make it, and that run's settings."""
    settings = settings_from(load_config(json.loads(json.dumps(config))))
    (batch,) = spec.batches(1)
    shapes = {name: torch.empty_like(value, device="meta") for name, value in batch.items()}
    return rehearse_run(spec.build, ((), shapes), settings), settings
