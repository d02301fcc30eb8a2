"""What a plan says of a budget is what the run does with it."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soak.models import Spec
from soak.plans import plan_then_run
from soak.training import config_for, update_in_backward

SPECS = st.builds(
    Spec,
    st.sampled_from(["layers", "images", "table", "gpt", "encoder", "recurrent"]),
    st.sampled_from([8, 16, 36]),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from([4, 7, 16]),
    st.just(""),
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config with budgets, without the path of a disk."""
    config = config_for(
        draw(st.sampled_from(["AdamW", "SGD", "Lion", "Muon"])),
        draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([0.0, 0.5])),
    )
    ours = config["patrickstar"]
    ours["chunk_size"] = draw(st.sampled_from(["auto", 1, 1000, 5000]))
    ours["policy"] = draw(st.sampled_from(["planned", "lru", "fifo"]))
    ours["overlap_update"] = draw(st.booleans())
    if draw(st.booleans()):
        update_in_backward(config)
    ours["memory"] = {"host": draw(st.integers(20, 400)) << 10}
    if draw(st.booleans()):
        ours["memory"]["device"] = draw(st.integers(20, 400)) << 10
        ours["update"] = draw(st.sampled_from(["host", "device"]))
    if draw(st.booleans()):
        ours["memory"]["disk"] = {}
    return config


def judged(spec: Spec, config: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        memory = config["patrickstar"]["memory"]
        if "disk" in memory:
            memory["disk"] = memory["disk"] | {"path": folder}
        return plan_then_run(spec, config)


@given(SPECS, configs())
@settings(
    max_examples=10,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_the_verdict_of_a_plan_is_never_wrong(spec: Spec, config: dict[str, Any]) -> None:
    assert judged(spec, config)["wrong"] is None


def test_the_run_names_the_budget_that_the_plan_names() -> None:
    config = config_for("AdamW", "bf16")
    config["patrickstar"] |= {"memory": {"host": 100_000, "disk": {}}, "chunk_size": 2000}
    found = judged(Spec("layers", 36, 2, 4, 64), config)
    assert found["named"]["host"] > 100_000
    assert found["same"] is True


@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_of_an_accumulation_lie_beside_the_next_forward(backwards: int) -> None:
    config = config_for("SGD", "fp32", backwards)
    config["patrickstar"]["memory"] = {"host": 400_000}
    found = judged(Spec("gpt", 64, 2, 2, 16), config)
    assert (found["wrong"], found["fits"]) == (None, False)


def test_a_chunk_more_that_the_device_cannot_hold_has_room_on_a_host_without_a_disk() -> None:
    config = config_for("Muon", "bf16", 2, 0.5)
    config["patrickstar"] |= {
        "chunk_size": 1,
        "policy": "fifo",
        "prefetch": False,
        "update": "host",
        "memory": {"host": 391073, "device": 586840},
    }
    assert judged(Spec("encoder", 96, 4, 4, 33), config)["wrong"] is None


DISKS: dict[str, tuple[Spec, dict[str, Any], dict[str, Any]]] = {
    "an optimizer with two kinds of states": (
        Spec("table", 184, 1, 1, 1),
        {"optimizer": {"type": "Muon", "params": {"lr": 0.001}}, "fp16": {"enabled": True}},
        {"memory": {"host": 497927, "disk": {"size": 405198}}, "policy": "fifo"},
    ),
    "unused parameters that memory has room for": (
        Spec("layers", 240, 3, 3, 1, "unused"),
        {"optimizer": {"type": "Lamb", "params": {"lr": 0.001}}, "bf16": {"enabled": True}},
        {"memory": {"host": 21818846, "disk": {"size": 727748}}, "chunk_size": 368246},
    ),
}


@pytest.mark.parametrize("name", list(DISKS))
def test_a_size_of_the_disk_that_is_said_to_do_does(name: str) -> None:
    spec, config, ours = DISKS[name]
    config = config_for("SGD", "fp32") | config
    config["patrickstar"] = config["patrickstar"] | ours
    assert judged(spec, config)["wrong"] is None
