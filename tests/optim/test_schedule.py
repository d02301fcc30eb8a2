from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from patrickstar.errors import CheckpointError, ConfigError
from patrickstar.optim import LRRangeTest, Schedule, WarmupCosineLR, WarmupDecayLR, WarmupLR
from patrickstar.optim.one_cycle import OneCycle

from .deepspeed_oracle import deepspeed_module


class Groups:
    """Just enough of an optimizer: two groups with rates and betas."""

    def __init__(self, *rates: float) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"lr": rate, "betas": (0.9, 0.999)} for rate in rates or (0.1, 0.2)
        ]

    @property
    def rates(self) -> list[float]:
        return [group["lr"] for group in self.param_groups]


def trajectory(schedule: Schedule, steps: int) -> list[float]:
    """The first group's rate at the start and after each step."""
    rates = [schedule.optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        schedule.step()
        rates.append(schedule.optimizer.param_groups[0]["lr"])
    return rates


def test_warmup_is_logarithmic_by_default() -> None:
    schedule = WarmupLR(Groups(), 0.0, 0.1, 10)
    want = [0.0] + [0.1 * math.log(t + 1) / math.log(10) for t in range(10)] + [0.1, 0.1]
    assert trajectory(schedule, 12) == pytest.approx(want)


def test_linear_warmup_is_a_straight_line_to_the_groups_own_rates() -> None:
    groups = Groups(0.4, 0.8)
    schedule = WarmupLR(groups, warmup_num_steps=4, warmup_type="linear")
    assert groups.rates == [0.0, 0.0]
    assert trajectory(schedule, 6) == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.4])
    assert schedule.get_last_lr() == pytest.approx([0.4, 0.8])


def test_decay_goes_down_to_zero_at_the_last_step_and_stays() -> None:
    schedule = WarmupDecayLR(Groups(), 6, 0.0, 0.4, 2, "linear")
    want = [0.0, 0.0, 0.2, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0]
    assert trajectory(schedule, 8) == pytest.approx(want)


def test_cosine_scales_the_groups_own_rates() -> None:
    groups = Groups(1.0, 3.0)
    schedule = WarmupCosineLR(groups, 6, 0.5, 2, 0.2, "linear")
    cosine = [0.2 + 0.8 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    want = [0.0, 0.5, 0.75, *cosine, 0.2, 0.2]
    assert trajectory(schedule, 8) == pytest.approx(want)
    assert groups.rates == pytest.approx([0.2, 0.6])


def test_the_range_test_raises_the_rate_smoothly_or_in_stairs() -> None:
    smooth = LRRangeTest(Groups(), 0.1, 2, 1.0)
    assert trajectory(smooth, 4) == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])
    stairs = LRRangeTest(Groups(), [0.1, 0.3], 2, 1.0, True)
    assert trajectory(stairs, 4) == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3])


def test_one_cycle_goes_up_down_and_decays_with_momentum_against_it() -> None:
    groups = Groups(0.5)
    schedule = OneCycle(groups, 0.1, 0.5, 1.0, 2, 2, decay_step_size=1, decay_mom_rate=0.1)
    assert groups.param_groups[0]["betas"] == (0.8, 0.99)
    rates, momentum = [groups.rates[0]], []
    for _ in range(6):
        schedule.step()
        rates.append(groups.rates[0])
        momentum.append(groups.param_groups[0]["betas"][0])
    # At position t the cycle is at t + 1: up, top, down, bottom; then intervals 1, 2.
    assert rates == pytest.approx([0.1, 0.3, 0.5, 0.3, 0.1, 0.05, 0.1 / 3])
    assert momentum == pytest.approx([0.85, 0.8, 0.85, 0.9, 0.99, 1.08])


def test_one_cycle_in_stairs_holds_the_rate() -> None:
    schedule = OneCycle(Groups(0.5), 0.0, 1.0, 0.0, 4, 4, 2)
    assert trajectory(schedule, 8) == pytest.approx([0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0])


def test_one_cycle_without_betas_says_that_momentum_is_not_cycled() -> None:
    groups = Groups()
    for group in groups.param_groups:
        del group["betas"]
    with pytest.warns(UserWarning, match="no betas"):
        schedule = OneCycle(groups, 0.1, 0.5)
    assert schedule.get_mom() is None


MAKE = {
    "WarmupLR": lambda cls, opt: cls(opt, 0.001, 0.1, 7),
    "WarmupLR-linear": lambda cls, opt: cls(opt, [0.0, 0.1], [0.1, 0.5], 7, "linear"),
    "WarmupLR-own": lambda cls, opt: cls(opt),
    "WarmupDecayLR": lambda cls, opt: cls(opt, 23, 0.001, 0.1, 7),
    "WarmupDecayLR-linear": lambda cls, opt: cls(opt, 23, 0.001, 0.1, 7, "linear"),
    "WarmupCosineLR": lambda cls, opt: cls(opt, 23, 0.1, 7, 0.01),
    "WarmupCosineLR-linear": lambda cls, opt: cls(opt, 23, 0.1, 7, 0.01, "linear"),
    "LRRangeTest": lambda cls, opt: cls(opt, 0.01, 5, 0.7),
    "LRRangeTest-stairs": lambda cls, opt: cls(opt, 0.01, 5, 0.7, True),
    "OneCycle": lambda cls, opt: cls(opt, 0.01, 0.1, 0.3, 7, 5, decay_step_size=3),
    "OneCycle-stairs": lambda cls, opt: cls(opt, 0.01, 0.1, 0.3, 7, 5, 3, 2, 3, decay_mom_rate=0.1),
    "OneCycle-no-momentum": lambda cls, opt: cls(opt, 0.01, 0.1, cycle_momentum=False),
}
OURS: dict[str, Any] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


def torch_optimizer() -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": params[:1], "lr": 0.1}, {"params": params[1:], "lr": 0.2}]
    return torch.optim.Adam(groups)


@pytest.mark.parametrize("name", MAKE)
def test_rates_and_momentum_are_deepspeeds_to_the_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = deepspeed_module("runtime.lr_schedules", monkeypatch)
    base = name.split("-")[0]
    one, other = torch_optimizer(), torch_optimizer()
    theirs, ours = MAKE[name](getattr(module, base), one), MAKE[name](OURS[base], other)
    for _ in range(40):
        for left, right in zip(one.param_groups, other.param_groups, strict=True):
            assert (left["lr"], left["betas"]) == (right["lr"], right["betas"])
        theirs.step()
        ours.step()
        assert ours.get_last_lr() == theirs.get_last_lr()
        assert ours.state_dict() == theirs.state_dict()


@pytest.mark.parametrize("name", MAKE)
def test_a_checkpoint_continues_at_the_same_rates(name: str) -> None:
    base = name.split("-")[0]
    one, other = torch_optimizer(), torch_optimizer()
    first, second = MAKE[name](OURS[base], one), MAKE[name](OURS[base], other)
    for _ in range(9):
        first.step()
    second.load_state_dict(first.state_dict())
    for _ in range(20):
        assert second.get_last_lr() == first.get_last_lr()
        assert [g["betas"] for g in one.param_groups] == [g["betas"] for g in other.param_groups]
        first.step()
        second.step()


def test_a_rate_that_is_a_tensor_is_changed_in_place() -> None:
    optimizer = torch_optimizer()
    rate = torch.tensor(0.5)
    optimizer.param_groups[0]["lr"] = rate
    schedule = WarmupLR(optimizer, 0.0, 0.4, 4, "linear")
    schedule.step(2)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: WarmupLR(Groups(), warmup_num_steps=0), "warmup_num_steps"),
        (lambda: WarmupLR(Groups(), warmup_type="cubic"), "cubic"),
        (lambda: WarmupLR(Groups(), [0.1, 0.2, 0.3]), "warmup_min_lr"),
        (lambda: WarmupCosineLR(Groups(), 5, warmup_num_steps=-1), "warmup_num_steps"),
        (lambda: LRRangeTest(Groups(), lr_range_test_step_size=0), "lr_range_test_step_size"),
        (lambda: OneCycle(Groups(), 0.1, 0.2, cycle_first_step_size=0), "cycle_first_step_size"),
        (lambda: OneCycle(Groups(), 0.1, 0.2, cycle_second_step_size=-1), "cycle_second_step_size"),
    ],
)
def test_an_argument_out_of_range_is_named(make: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make()


def test_a_run_shorter_than_its_warmup_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="total_num_steps=3"):
        WarmupDecayLR(Groups(), 3, warmup_num_steps=10)


def test_a_checkpoint_without_a_position_is_refused() -> None:
    with pytest.raises(CheckpointError, match="last_batch_iteration"):
        WarmupLR(Groups()).load_state_dict({"epoch": 3})
