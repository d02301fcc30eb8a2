"""Number formats, and the loss scale."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from patrickstar.config import ConfigWarning, load_config
from patrickstar.errors import ConfigError


def test_without_a_section_everything_is_fp32() -> None:
    config = load_config({})
    assert config.precision == "fp32"
    assert config.grad_accum_dtype is None


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_an_enabled_section_is_the_precision(name: str) -> None:
    assert load_config({name: {"enabled": True}}).precision == name
    assert load_config({name: {"enabled": False}}).precision == "fp32"
    assert load_config({name: {}}).precision == "fp32"


def test_both_enabled_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp16.*bf16"):
        load_config({"fp16": {"enabled": True}, "bf16": {"enabled": True}})


def test_templates_that_leave_the_precision_to_the_trainer_are_fp32() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config(
            {
                "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": "auto"},
                "bf16": {"enabled": "auto"},
            }
        )
    assert config.precision == "fp32"
    assert config.fp16.hysteresis == 2


def test_the_defaults_of_the_loss_scale_are_deepspeeds() -> None:
    fp16 = load_config({"fp16": {"enabled": True}}).fp16
    assert (fp16.loss_scale, fp16.initial_scale_power, fp16.loss_scale_window) == (0, 16, 1000)
    assert (fp16.hysteresis, fp16.consecutive_hysteresis, fp16.min_loss_scale) == (2, False, 1)


@pytest.mark.parametrize(
    "key, value",
    [
        ("loss_scale", -1),
        ("loss_scale", float("inf")),
        ("loss_scale", float("nan")),
        ("loss_scale", True),
        ("loss_scale", "dynamic"),
        ("loss_scale_window", 0),
        ("loss_scale_window", 1.5),
        ("min_loss_scale", 0),
        ("hysteresis", 0),
        ("initial_scale_power", -1),
        ("initial_scale_power", 1e400),
        ("enabled", 1),
        ("enabled", "true"),
        ("consecutive_hysteresis", None),
    ],
)
def test_a_bad_value_names_the_key_and_the_value(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({"fp16": {key: value}})
    assert f"fp16.{key}" in str(raised.value)
    assert {True: "true", None: "null"}.get(value, str(value)) in str(raised.value) or repr(
        value
    ) in str(raised.value)


@pytest.mark.parametrize(
    "name, dtype",
    [("fp32", "fp32"), ("bf16", "bf16"), ("bfloat16", "bf16"), ("torch.float16", "fp16")],
)
def test_gradients_can_be_accumulated_in_another_dtype(name: str, dtype: str) -> None:
    assert load_config({"data_types": {"grad_accum_dtype": name}}).grad_accum_dtype == dtype


def test_an_unknown_dtype_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"data_types\.grad_accum_dtype.*int8.*fp32.*bf16"):
        load_config({"data_types": {"grad_accum_dtype": "int8"}})


def test_param_dtype_must_be_the_precision() -> None:
    assert load_config({"bf16": {"enabled": True}, "data_types": {"param_dtype": "bf16"}})
    with pytest.raises(ConfigError, match=r"data_types\.param_dtype"):
        load_config({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}})


def test_bfloat16_is_the_old_name_of_bf16() -> None:
    with pytest.warns(ConfigWarning, match=r"bfloat16.*bf16"):
        assert load_config({"bfloat16": {"enabled": True}}).precision == "bf16"


def test_an_old_name_that_contradicts_the_new_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        load_config({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}})


@pytest.mark.parametrize(
    "section, key",
    [
        ("fp16", "fp16_master_weights_and_grads"),
        ("bf16", "bf16_master_weights_and_grads"),
        ("bf16", "bf16_optimizer_states"),
    ],
)
def test_master_weights_stay_fp32(section: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key}.*patrickstar\.memory"):
        load_config({section: {key: True}})
    assert load_config({section: {key: False}})
