"""Configs of the original PatrickStar."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from patrickstar.config import Config, ConfigWarning, load_config
from patrickstar.config.keys import TABLE
from patrickstar.errors import ConfigError

# As its example of BERT makes it.
ORIGINAL: dict[str, Any] = {
    "optimizer": {
        "type": "Adam",
        "params": {
            "lr": 0.001,
            "betas": (0.9, 0.999),
            "eps": 1e-6,
            "weight_decay": 0,
            "use_hybrid_adam": True,
        },
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 10,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "default_chunk_size": 32 * 1024 * 1024,
    "release_after_init": False,
    "use_fake_dist": False,
    "use_cpu_embedding": False,
    "client": {
        "mem_tracer": {
            "use_async_mem_monitor": True,
            "warmup_gpu_chunk_mem_ratio": 0.1,
            "overall_gpu_mem_ratio": 0.9,
            "overall_cpu_mem_ratio": 0.9,
            "margin_use_ratio": 0.8,
            "use_fake_dist": False,
            "with_static_partition": False,
        },
        "opts": {"with_mem_saving_comm": False, "with_mem_cache": True, "with_async_move": True},
    },
}


def told(config: dict[str, Any]) -> tuple[Config, list[str]]:
    """The config, and what a user is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = load_config(config)
    assert all(issubclass(one.category, ConfigWarning) for one in caught)
    return loaded, [str(one.message) for one in caught]


def test_its_example_loads_with_one_warning_that_names_every_old_key() -> None:
    config, remarks = told(ORIGINAL)
    assert config.precision == "fp16"
    assert config.patrickstar.chunk_size == 32 * 1024 * 1024
    assert config.optimizer is not None
    assert "use_hybrid_adam" not in config.optimizer.params
    [remark] = remarks
    old = {
        *(name for name in ORIGINAL if name not in ("optimizer", "fp16", "client")),
        *(f"client.{a}.{b}" for a, section in ORIGINAL["client"].items() for b in section),
        "optimizer.params.use_hybrid_adam",
    }
    for path in old:
        assert f"{path}: " in remark


@pytest.mark.parametrize(
    "keys, today",
    [
        ({"default_chunk_size": 1000}, "patrickstar.chunk_size"),
        ({"use_cpu_embedding": True}, "patrickstar.memory.device"),
        ({"client": {"mem_tracer": {"overall_gpu_mem_ratio": 0.9}}}, "patrickstar.memory.device"),
        ({"client": {"mem_tracer": {"overall_cpu_mem_ratio": 0.9}}}, "patrickstar.memory.host"),
        ({"client": {"mem_tracer": {"with_static_partition": True}}}, "patrickstar.policy"),
        ({"client": {"opts": {"with_async_move": True}}}, "patrickstar.prefetch"),
    ],
)
def test_an_old_key_names_todays(keys: dict[str, Any], today: str) -> None:
    _, [remark] = told(keys)
    assert f"`{today}`" in remark
    assert today in TABLE


def test_the_chunk_size_under_both_names_must_agree() -> None:
    ours = {"patrickstar": {"chunk_size": 2000}}
    with pytest.raises(ConfigError, match=r"default_chunk_size.*patrickstar\.chunk_size"):
        load_config({"default_chunk_size": 1000} | ours)


def test_a_misspelt_old_key_is_an_error_like_any_other() -> None:
    with pytest.raises(ConfigError, match="margin_use_ratio"):
        load_config({"client": {"mem_tracer": {"margin_use_ration": 0.8}}})


@pytest.mark.parametrize("value", ["large", 0, -5, True, 1.5])
def test_an_old_key_has_a_type_too(value: Any) -> None:
    with pytest.raises(ConfigError, match="chunk_size"):
        load_config({"default_chunk_size": value})


def test_it_says_that_gradients_are_clipped_now() -> None:
    _, [remark] = told(ORIGINAL)
    assert "gradient_clipping" in remark
    _, [remark] = told(ORIGINAL | {"gradient_clipping": 0})
    assert "gradient_clipping" not in remark
    _, remarks = told({"fp16": {"enabled": True}})
    assert remarks == []


def test_the_warning_points_at_the_line_that_loads() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_config(ORIGINAL)
    assert caught[0].filename == __file__
