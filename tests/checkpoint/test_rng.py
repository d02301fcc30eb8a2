"""Random numbers go on where they were."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy
import pytest
import torch

from patrickstar.checkpoint import rng_state, set_rng_state
from patrickstar.errors import CheckpointError


def draw() -> tuple[Any, ...]:
    normal = torch.randn(3)  # an odd number: torch keeps half of a pair for the next call
    return random.random(), random.gauss(0, 1), numpy.random.randn(3).tolist(), normal.tolist()


def test_all_generators_go_on_where_they_were() -> None:
    draw()
    state = json.loads(json.dumps(rng_state()))
    expected = [draw() for _ in range(3)]
    set_rng_state(state)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("key", ["python", "numpy", "cpu"])
@pytest.mark.parametrize("value", [None, 3, [], {"$bytes": "AAAA"}, {"$tuple": [1, 2, 3]}])
def test_a_damaged_state_is_named(key: str, value: Any) -> None:
    before = rng_state()
    try:
        with pytest.raises(CheckpointError, match=f"'{key}'"):
            set_rng_state({**before, key: value})
        with pytest.raises(CheckpointError, match=f"'{key}'"):
            set_rng_state({k: v for k, v in before.items() if k != key})
    finally:
        set_rng_state(before)
