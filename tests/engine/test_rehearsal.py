"""A rehearsal writes the trace that the first live iteration writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import patrickstar
from patrickstar.engine.refusal import rehearsed_trace, shapes_of
from patrickstar.memory import Trace
from patrickstar.models import GPT, preset


def live_and_rehearsed(config: dict[str, Any], **changes: Any) -> tuple[Trace, Trace]:
    shape = dataclasses.replace(preset("gpt-tiny"), layers=2, **changes)
    engine, optimizer = patrickstar.initialize_engine(lambda: GPT(shape), config)
    tokens = torch.randint(0, 256, (1, 64))
    engine.backward(engine(tokens, tokens))
    optimizer.step()
    live = next(iter(engine.memory.plans.values())).plan.trace
    base = engine._segments.base
    rehearsed = rehearsed_trace(
        engine.module, engine._state, shapes_of(((tokens, tokens), {})), base
    )
    engine.close()
    return live, rehearsed


@pytest.mark.parametrize(
    ("precision", "checkpointing"),
    [({"bf16": {"enabled": True}}, None), ({}, "reentrant"), ({}, "non-reentrant")],
    ids=["bf16", "fp32, reentrant", "fp32, non-reentrant"],
)
def test_it_is_the_live_trace_to_the_byte(
    precision: dict[str, Any], checkpointing: str | None, tmp_path: Path
) -> None:
    config = {
        **precision,
        "gradient_clipping": 1.0,
        "patrickstar": {"memory": {"host": "16MiB", "disk": str(tmp_path)}},
    }
    live, rehearsed = live_and_rehearsed(config, checkpointing=checkpointing)
    assert [moment.uses for moment in rehearsed.moments] == [moment.uses for moment in live.moments]
    assert [moment.held for moment in rehearsed.moments] == [moment.held for moment in live.moments]
    assert [moment.other for moment in rehearsed.moments] == [
        moment.other for moment in live.moments
    ]
    assert [first for first, _ in rehearsed.segments] == [first for first, _ in live.segments]
