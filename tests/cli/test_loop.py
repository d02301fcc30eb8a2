"""The training loop: what it counts, and when it stops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from patrickstar.cli.loop import DivergedError, StepMetrics, training_steps
from patrickstar.data import Batches
from patrickstar.models import GPT, GPTConfig

from .fake_engine import FakeEngine

BATCHES = Batches(torch.arange(256, dtype=torch.uint8), batch_size=2, sequence_length=8, seed=0)


def engine(config: dict[str, Any] | None = None, losses: list[float] | None = None) -> FakeEngine:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, width=8, heads=2, positions=8))
    return FakeEngine(model, config or {}, losses or [])


def run(engine: FakeEngine, steps: int) -> list[StepMetrics]:
    seconds = itertools.count(step=0.5)  # half a second passes between two looks at the clock
    return list(training_steps(engine, engine, BATCHES, steps, clock=lambda: next(seconds)))


def test_a_step_reports_its_own_speed_peak_and_movement() -> None:
    first, second = run(engine(), 2)
    assert (first.step, second.step) == (1, 2)
    assert second.step_time_s == 0.5
    assert second.tokens_per_s == 2 * 8 / 0.5
    assert (first.peak_bytes, second.peak_bytes) == ({"host": 10}, {"host": 20})
    assert (first.moved_bytes, second.moved_bytes) == ({"host->disk": 100}, {"host->disk": 100})
    assert (second.lr, second.grad_norm) == (0.1, 1.5)


def test_a_step_with_gradient_accumulation_has_several_micro_batches() -> None:
    accumulating = engine({"gradient_accumulation_steps": 2}, losses=[1.0, 3.0, 5.0, 7.0])
    steps = run(accumulating, 2)
    assert [metrics.loss for metrics in steps] == [2.0, 6.0]
    assert steps[0].tokens_per_s == 2 * 2 * 8 / 0.5
    assert accumulating.moved == 200
    assert len({tuple(tokens.flatten().tolist()) for tokens in accumulating.seen}) == 4


def test_the_model_learns() -> None:
    steps = run(engine(), 100)
    assert steps[-1].loss < steps[0].loss - 0.1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_before_its_update(bad: float) -> None:
    diverging = engine(losses=[1.0, 2.0, bad])
    with pytest.raises(DivergedError, match=rf"the loss is {bad} at step 3"):
        run(diverging, 5)
    assert diverging.moved == 200


def test_an_infinite_norm_is_reported_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    overflowing = engine()
    monkeypatch.setattr(overflowing, "get_global_grad_norm", lambda: float("inf"))
    assert run(overflowing, 1)[0].grad_norm is None
