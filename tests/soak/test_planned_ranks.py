"""What is said of two ranks is what they do."""

from __future__ import annotations

import pytest

from soak.models import Spec
from soak.planned_ranks import plan_then_run_ranks
from soak.training import config_for


@pytest.mark.slow
@pytest.mark.parametrize(("host", "said"), [(64 << 20, True), (20_000, False)])
def test_what_is_said_of_two_ranks_is_right(host: int, said: bool) -> None:
    config = config_for("AdamW", "bf16")
    config["zero_optimization"] = {"stage": 3}
    config["patrickstar"]["memory"] = {"host": host}
    found = plan_then_run_ranks(Spec("layers", 32, 2, 2), config)
    assert found == {"wrong": None, "said": said, "ran": said}
