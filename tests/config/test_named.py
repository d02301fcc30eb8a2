"""``optimizer`` and ``scheduler``."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from patrickstar.config import Config, load_config
from patrickstar.config.keys import TABLE
from patrickstar.config.optimizer import Optimizer
from patrickstar.config.scheduler import Scheduler
from patrickstar.errors import ConfigError
from patrickstar.optim import rule_named, schedule_named


def optimizer(**section: Any) -> Optimizer:
    loaded = load_config({"optimizer": section}).optimizer
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("name", Optimizer.spellings)
def test_an_optimizer_may_be_spelt_in_any_case(name: str) -> None:
    assert optimizer(type=name.lower()).type == optimizer(type=name.upper()).type == name


@pytest.mark.parametrize("name", Scheduler.spellings)
def test_a_schedule_may_be_spelt_in_any_case(name: str) -> None:
    config = load_config({"scheduler": {"type": name.lower(), "params": {}}})
    assert config.scheduler is not None
    assert config.scheduler.type == name


def test_a_class_of_pytorch_keeps_its_name() -> None:
    assert optimizer(type="NAdam").type == "NAdam"


def test_lists_become_tuples_and_whole_floats_counts() -> None:
    assert optimizer(type="AdamW", params={"betas": [0.9, 0.95]}).params == {"betas": (0.9, 0.95)}
    config = load_config({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1e3}}})
    assert config.scheduler is not None
    assert config.scheduler.params == {"warmup_num_steps": 1000}
    assert isinstance(config.scheduler.params["warmup_num_steps"], int)


def test_params_are_the_callers_own() -> None:
    section = optimizer(type="AdamW", params={"lr": 1.0})
    section.params["lr"] = 2.0
    assert section.params == {"lr": 1.0}


@pytest.mark.parametrize("section", [None, {}, {"type": None}, {"type": None, "params": {}}])
@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
def test_a_section_without_a_type_is_none(name: str, section: Any) -> None:
    config: Config = load_config({name: section})
    assert getattr(config, name) is None


@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
def test_params_without_a_type_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}\.type is missing"):
        load_config({name: {"params": {"lr": 1.0}}})


@pytest.mark.parametrize(
    "name, value", [("lr", "1e-4"), ("betas", [0.9]), ("betas", 0.9), ("amsgrad", 1), ("eps", True)]
)
def test_a_wrong_type_names_the_parameter(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.params\.{name} is .*; expected (a|true)"):
        optimizer(type="AdamW", params={name: value})


@pytest.mark.parametrize("name", Optimizer.spellings)
def test_every_parameter_that_the_table_has_for_an_optimizer_is_one_it_takes(name: str) -> None:
    rows = [
        key
        for key in TABLE.values()
        if key.parent == "optimizer.params" and name in re.findall(r"\w+", key.note)
    ]
    assert rows
    params = {key.name: key.default for key in rows if key.default is not None}
    section = optimizer(type=name, params=params)
    rule_named(section.type, section.params)


@pytest.mark.parametrize("name", Scheduler.spellings)
def test_every_parameter_that_the_table_has_for_a_schedule_is_one_it_takes(name: str) -> None:
    rows = [
        key
        for key in TABLE.values()
        if key.parent == "scheduler.params" and name in re.findall(r"\w+", key.note)
    ]
    assert rows
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    for key in rows:
        schedule_named(name, {key.name: 1})
    schedule_named(name, {"last_batch_iteration": -1, **_needed(name)})(sgd)


def _needed(name: str) -> dict[str, Any]:
    if name == "OneCycle":
        return {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_momentum": False}
    if name in ("WarmupDecayLR", "WarmupCosineLR"):
        return {"total_num_steps": 10, "warmup_num_steps": 5}
    return {}
