from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.errors import CheckpointError, ConfigError, PatrickStarError
from patrickstar.optim import DynamicLossScale, LossScaleError, StaticLossScale, make_loss_scale

from .deepspeed_oracle import deepspeed_module


def scales(scaler: DynamicLossScale, overflows: list[int]) -> list[float]:
    seen = []
    for overflow in overflows:
        scaler.update_scale(bool(overflow))
        seen.append(scaler.loss_scale)
    return seen


def test_the_scale_doubles_after_a_window_of_good_steps() -> None:
    scaler = DynamicLossScale(initial_scale_power=4, loss_scale_window=3)
    # The first window counts from before the first step, so it ends with the fourth.
    assert scales(scaler, [0] * 7) == [16, 16, 16, 32, 32, 32, 64]


def test_hysteresis_forgives_overflows_before_the_scale_is_halved() -> None:
    scaler = DynamicLossScale(initial_scale_power=4, loss_scale_window=100, hysteresis=3)
    assert scales(scaler, [1, 0, 1, 0, 1, 1]) == [16, 16, 16, 16, 8, 4]


def test_consecutive_hysteresis_is_full_again_after_a_good_step() -> None:
    scaler = DynamicLossScale(
        initial_scale_power=4, loss_scale_window=100, hysteresis=2, consecutive_hysteresis=True
    )
    assert scales(scaler, [1, 0, 1, 0, 1, 1]) == [16, 16, 16, 16, 16, 8]


def test_hysteresis_is_full_again_when_the_scale_grows() -> None:
    scaler = DynamicLossScale(initial_scale_power=4, loss_scale_window=2, hysteresis=2)
    assert scales(scaler, [1, 0, 0, 0, 1]) == [16, 16, 16, 32, 32]


def test_an_overflow_at_the_smallest_scale_is_an_error_that_says_what_to_do() -> None:
    scaler = DynamicLossScale(initial_scale_power=1, hysteresis=1, min_loss_scale=1.0)
    assert scales(scaler, [1]) == [1.0]
    with pytest.raises(LossScaleError, match=r"min_loss_scale=1.0.*bf16") as caught:
        scaler.update_scale(True)
    assert isinstance(caught.value, PatrickStarError)


def test_the_step_that_doubles_the_scale_is_unscaled_with_the_scale_of_its_loss() -> None:
    scaler = DynamicLossScale(initial_scale_power=4, loss_scale_window=1, hysteresis=1)
    assert [scaler.settle(bool(o)) for o in (0, 0, 1, 0)] == [16.0, 16.0, None, 16.0]
    exact = DynamicLossScale(
        initial_scale_power=4, loss_scale_window=1, hysteresis=1, deepspeed_exact=True
    )
    assert [exact.settle(bool(o)) for o in (0, 0, 1, 0)] == [16.0, 32.0, None, 16.0]


@settings(max_examples=30, deadline=None)
@given(
    overflows=st.lists(st.sampled_from([0, 0, 0, 1]), max_size=60),
    cut=st.integers(0, 60),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
)
def test_a_checkpoint_continues_with_the_same_scales(
    overflows: list[int], cut: int, window: int, hysteresis: int
) -> None:
    how: dict[str, Any] = {"loss_scale_window": window, "hysteresis": hysteresis}
    one, first, second = (DynamicLossScale(100, **how) for _ in range(3))
    want = scales(one, overflows)
    got = scales(first, overflows[:cut])
    second.load_state_dict(first.state_dict())
    assert got + scales(second, overflows[cut:]) == want


def test_a_static_scale_stays_and_its_overflows_are_skipped() -> None:
    scaler = make_loss_scale(128.0)
    assert isinstance(scaler, StaticLossScale)
    assert [scaler.settle(False), scaler.settle(True), scaler.settle(False)] == [128.0, None, 128.0]
    other = StaticLossScale()
    other.load_state_dict(scaler.state_dict())
    assert other.loss_scale == 128.0


def test_a_scale_of_zero_means_dynamic_with_deepspeeds_defaults() -> None:
    scaler = make_loss_scale(0)
    assert isinstance(scaler, DynamicLossScale)
    assert (scaler.loss_scale, scaler.loss_scale_window, scaler.hysteresis) == (65536.0, 1000, 2)


@pytest.mark.parametrize(
    "bad",
    [
        {"initial_scale_power": -1},
        {"loss_scale_window": 0},
        {"hysteresis": 0},
        {"min_loss_scale": 0.0},
    ],
)
def test_an_argument_out_of_range_is_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        DynamicLossScale(**bad)


def test_a_checkpoint_without_a_scale_is_refused() -> None:
    with pytest.raises(CheckpointError, match="cur_scale"):
        DynamicLossScale().load_state_dict({"cur_iter": 3})


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_scales_are_deepspeeds(
    consecutive: bool, hysteresis: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = deepspeed_module("runtime.fp16.loss_scaler", monkeypatch)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    theirs = module.DynamicLossScaler(2.0**40, window, 1.0, hysteresis, consecutive)
    ours = DynamicLossScale(40, window, hysteresis, consecutive, 1.0)
    pattern = [0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    for overflow in pattern * 2:
        theirs.update_scale(bool(overflow))
        ours.update_scale(bool(overflow))
        assert ours.loss_scale == theirs.loss_scale
