"""What is accepted with a warning, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from patrickstar.config import Config, ConfigWarning, load_config
from patrickstar.config.key import Key, Status
from patrickstar.config.keys import TABLE
from patrickstar.errors import ConfigError


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def silently(config: dict[str, Any]) -> Config:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_config(config)


def test_all_keys_without_effect_are_told_in_one_warning() -> None:
    config = {
        "dump_state": True,
        "zero_optimization": {"stage": 2, "contiguous_gradients": True, "reduce_bucket_size": 5e8},
    }
    with pytest.warns(ConfigWarning) as caught:
        load_config(config)
    assert len(caught) == 1
    text = str(caught[0].message)
    for path in ("dump_state", "zero_optimization.contiguous_gradients"):
        assert text.count(path) == 1
    assert caught[0].filename == __file__


def test_a_key_that_asks_for_nothing_does_not_warn() -> None:
    silently({"dump_state": False, "memory_breakdown": False, "checkpoint": {"writer": None}})


def test_a_section_that_is_off_neither_warns_nor_raises() -> None:
    off = {"enabled": False}
    silently(
        {
            "flops_profiler": {**off, "profile_step": 5, "detailed": True},
            "autotuning": {**off, "fast": False},
            "comet": off,
            "elasticity": {**off, "max_train_batch_size": 2000},
            "weight_quantization": off,
            "tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}},
            "compile": {"deepcompile": False},
        }
    )


def test_a_section_without_effect_is_told_once_for_all_its_keys() -> None:
    with pytest.warns(ConfigWarning) as caught:
        load_config({"aio": {"block_size": 1, "queue_depth": 32, "overlap_events": True}})
    assert str(caught[0].message).startswith("aio: has no effect here: ")


@pytest.mark.parametrize(
    "config, instead",
    [
        ({"autotuning": {"enabled": True}}, "patrickstar plan"),
        ({"weight_quantization": {}}, "leave it out"),
        ({"weight_quantization": {"num_bits": 4}}, "leave it out"),
        ({"zero_optimization": {"zenflow": {}}}, "leave it out"),
        ({"tensor_parallel": {"autotp_size": 2}}, "torch.distributed.tensor.parallel"),
        ({"compile": {"deepcompile": True}}, "torch.compile"),
        ({"elasticity": {"max_train_batch_size": 2000}}, "set the batch sizes"),
        ({"gradient_allreduce_op": "sum"}, "multiply the loss"),
        ({"optimizer": {"type": "Lamb", "params": {"max_grad_norm": 1.0}}}, "gradient_clipping"),
        ({"amp": {"enabled": True, "opt_level": "O2"}}, "torch_autocast"),
        ({"sparse_gradients": True}, "leave it out"),
        ({"data_efficiency": {"enabled": True}}, "Sampler"),
    ],
)
def test_what_would_make_another_run_is_refused_with_what_to_use(
    config: dict[str, Any], instead: str
) -> None:
    with pytest.raises(ConfigError, match="is not supported") as raised:
        load_config(config)
    assert instead in str(raised.value)


@pytest.mark.parametrize(
    "key",
    [
        key
        for key in TABLE.values()
        if key.status is not Status.HONOURED and key.note and not key.section
    ],
    ids=lambda key: key.path,
)
def test_no_key_with_a_note_is_ignored(key: Key) -> None:
    config = nested(key.path, _asking(key))
    config.setdefault("optimizer", {}).setdefault("type", "Adam")
    if key.status is Status.REJECTED:
        with pytest.raises(ConfigError) as raised:
            load_config(config)
        assert f"{key.path} is not supported: {key.note}" in str(raised.value)
    else:
        with pytest.warns(ConfigWarning) as caught:
            load_config(config)
        assert f"{key.path}: has no effect here: {key.note}" in str(caught[0].message)


def _asking(key: Key) -> Any:
    """A value of the right type that is not a harmless one."""
    for value in (True, False, 7, 0.5, "fp32", {"a": 1}, ["a"]):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load_config(nested(key.path, value) | {"optimizer": {"type": "Adam"}})
        except ConfigError as error:
            if "; expected " in str(error):
                continue
        if not key.asks_for_nothing(value):
            return value
    raise AssertionError(f"no value suits {key.path}")


def test_what_a_templates_trainer_fills_in_is_the_default_until_then() -> None:
    config = silently(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"},
            },
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": "auto",
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
            },
        }
    )
    assert config.gradient_clipping == 1.0
    assert config.optimizer is not None
    assert config.optimizer.params == {}
    assert config.scheduler is not None
    assert config.scheduler.params == {}


def test_auto_does_not_hide_a_misspelt_key() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'zero_optimization\.overlap_comm'"):
        load_config({"zero_optimization": {"overlap_com": "auto"}})


def test_several_problems_are_told_together() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({"optimzer": {}, "autotuning": {"enabled": True}, "aio": {"block_size": "x"}})
    lines = str(raised.value).splitlines()
    assert len(lines) == 3
    assert lines[2] == "aio.block_size is 'x'; expected an integer"


def test_a_warning_points_to_the_line_that_called_the_package() -> None:
    with pytest.warns(ConfigWarning) as told:
        load_config({"zero_optimization": True})
    assert told[0].filename == __file__
