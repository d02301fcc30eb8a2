"""Losses of the soak's budgets, each as small as it was when it was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from soak.budgets import run
from soak.models import Spec
from soak.training import config_for


def outcome(spec: Spec, config: dict[str, Any], **ours: Any) -> dict[str, Any]:
    config["patrickstar"] |= ours
    return run(spec, config, lambda: None)


def test_a_path_that_was_not_foreseen_is_not_refused_for_what_is_only_guessed(
    tmp_path: Path,
) -> None:
    spec = Spec("experts", 248, 3, 2, 1)
    config = config_for("SGD", "fp32", 1, 0.5)
    # Three chunks and a little: in the second step another expert is used than in the first.
    memory = {"host": 12_108_736, "disk": {"path": str(tmp_path)}}
    found = outcome(spec, config, chunk_size=988_036, overlap_update=False, memory=memory)
    assert "losses" in found, found


def test_a_budget_that_is_named_works_with_the_chunks_that_it_makes_longer() -> None:
    spec = Spec("layers", 236, 2, 1, 64, "tied")
    config = config_for("Lion", "fp16")
    config["patrickstar"] |= {"chunk_size": "auto", "policy": "lru", "prefetch": False}
    refusals = []
    budget = 950_275
    while "losses" not in (found := outcome(spec, config, memory={"host": budget})):
        budget = found["refused"]["smallest"]
        refusals.append(found["refused"]["made"])
    # Once for what building and updating the whole state takes, once for the batch.
    assert refusals == [False, True]
