from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from patrickstar.errors import ConfigError
from patrickstar.optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lamb,
    Lion,
    Muon,
    TorchRule,
    WarmupDecayLR,
    WarmupLR,
    muon_hyper,
    rule_named,
    schedule_named,
)


@pytest.mark.parametrize(
    "name, params, rule",
    [
        ("Adam", {}, AdamW()),
        ("Adam", {"adam_w_mode": False}, Adam()),
        ("AdamW", {"adam_w_mode": False}, AdamW()),
        ("adamw", {"torch_adam": True}, AdamW()),
        ("SGD", {"momentum": 0.9}, SGD()),
        ("Adagrad", {}, Adagrad()),
        ("Lion", {}, Lion()),
        ("Lamb", {}, Lamb()),
        ("Muon", {}, Muon()),
        ("RMSprop", {"alpha": 0.9}, TorchRule(torch.optim.RMSprop)),
    ],
)
def test_names_mean_what_they_mean_in_deepspeed(
    name: str, params: dict[str, Any], rule: Any
) -> None:
    found, hyper = rule_named(name, params)
    assert found == rule
    assert all(hyper[key] == value for key, value in params.items() if key in found.defaults)


def test_defaults_are_deepspeeds() -> None:
    assert rule_named("AdamW")[1]["weight_decay"] == 0.0
    assert rule_named("AdamW", {"torch_adam": True})[1]["weight_decay"] == 0.01
    lion = rule_named("Lion")[1]
    assert (lion["lr"], lion["betas"]) == (1e-3, (0.9, 0.999))


def test_exactness_picks_deepspeeds_own_operators() -> None:
    rule, _ = rule_named("Adam", {"torch_adam": True}, deepspeed_exact=True)
    assert rule == TorchRule(torch.optim.AdamW)
    assert rule_named("Lion", deepspeed_exact=True)[0] == Lion(deepspeed_exact=True)


def test_lists_from_json_become_tuples() -> None:
    assert rule_named("AdamW", {"betas": [0.9, 0.95]})[1]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    "name, params, message",
    [
        ("AdamV", {}, "did you mean 'Adam"),
        ("AdamW", {"weight_decai": 0.1}, "did you mean 'weight_decay'"),
        ("AdamW", {"max_grad_norm": 1.0}, "gradient_clipping"),
        ("OneBitAdam", {}, "use AdamW"),
        ("LBFGS", {}, "LBFGS"),
        ("AdamW", {"lr": -1}, "lr=-1"),
        ("Muon", {"momentun": 0.9}, "did you mean 'momentum'"),
    ],
)
def test_what_cannot_be_honoured_is_an_error_that_says_what_to_use(
    name: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rule_named(name, params)


def test_a_parameter_without_effect_is_warned_about_with_the_reason() -> None:
    with pytest.warns(UserWarning, match="fp32_optimizer_states has no effect here, moments"):
        rule_named("AdamW", {"fp32_optimizer_states": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule_named("Adam", {"torch_adam": True, "adam_w_mode": False})


def test_both_halves_of_muon_take_shared_and_own_values() -> None:
    params = {"lr": 0.5, "muon_lr": 0.1, "weight_decay": 0.3, "betas": [0.8, 0.9], "momentum": 0.7}
    rule, hyper = rule_named("Muon", params)
    other = muon_hyper(rule, params, use_muon=False)
    assert hyper == muon_hyper(rule, params, use_muon=True)
    assert (hyper["lr"], hyper["momentum"], hyper["weight_decay"]) == (0.1, 0.7, 0.3)
    assert (other["lr"], other["betas"], other["weight_decay"]) == (0.5, (0.8, 0.9), 0.3)
    assert (hyper["use_muon"], other["use_muon"]) == (True, False)
    assert muon_hyper(rule, params | {"adam_lr": 0.2}, use_muon=False)["lr"] == 0.2
    assert rule_named("Muon", {"adam_w_mode": False})[0] == Muon(aux=Adam())


def test_schedules_are_made_by_name_for_an_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    made = schedule_named("WarmupLR", {"warmup_num_steps": 5})(optimizer)
    assert isinstance(made, WarmupLR) and made.warmup_num_steps == 5
    assert isinstance(
        schedule_named("warmupdecaylr", {"total_num_steps": 9999})(optimizer), WarmupDecayLR
    )
    theirs = schedule_named("StepLR", {"step_size": 2, "gamma": 0.5})(optimizer)
    assert isinstance(theirs, torch.optim.lr_scheduler.StepLR)


@pytest.mark.parametrize(
    "name, params, message",
    [
        ("WarmupLRR", {}, "did you mean 'WarmupLR'"),
        ("WarmupLR", {"warmup_steps": 5}, "did you mean 'warmup_num_steps'"),
        ("StepLR", {"step": 5}, "did you mean 'step_size'"),
    ],
)
def test_an_unknown_schedule_or_parameter_names_the_nearest(
    name: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule_named(name, params)
