"""ZeRO's section, and what its offload blocks mean for the disk tier."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from patrickstar.config import Config, ConfigWarning, load_config
from patrickstar.errors import ConfigError

NVME = {"device": "nvme", "nvme_path": "/local_nvme"}
BLOCKS = ("offload_optimizer", "offload_param")


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **keys}}


def silently(config: dict[str, Any]) -> Config:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_config(config)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_is_known(stage: int) -> None:
    assert silently({"zero_optimization": {"stage": stage}}).zero_optimization.stage == stage


@pytest.mark.parametrize("stage", [4, -1, "3", True, 1.5, None])
def test_another_stage_is_refused(stage: Any) -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage"):
        load_config({"zero_optimization": {"stage": stage}})


@pytest.mark.parametrize("block", BLOCKS)
def test_offload_to_cpu_is_host_memory_and_needs_nothing_else(block: str) -> None:
    assert silently(zero(**{block: {"device": "cpu"}})).patrickstar.memory.disk is None


@pytest.mark.parametrize("block", BLOCKS)
def test_offload_to_nvme_is_the_disk_tier(block: str) -> None:
    disk = silently(zero(**{block: NVME})).patrickstar.memory.disk
    assert disk is not None
    assert (disk.path, disk.size) == (Path("/local_nvme"), None)


@pytest.mark.parametrize("block", BLOCKS)
def test_offload_to_nvme_without_a_path_is_refused(block: str) -> None:
    with pytest.raises(ConfigError, match=rf"zero_optimization\.{block}\.nvme_path"):
        load_config(zero(**{block: {"device": "nvme"}}))


def test_a_path_without_offload_to_nvme_adds_no_disk_tier() -> None:
    block = {"device": "cpu", "nvme_path": "/local_nvme"}
    assert silently(zero(offload_optimizer=block)).patrickstar.memory.disk is None


def test_patrickstar_memory_disk_wins_with_a_warning() -> None:
    ours = {"patrickstar": {"memory": {"disk": "/scratch:1GiB"}}}
    with pytest.warns(ConfigWarning, match=r"/local_nvme.*/scratch|/scratch.*/local_nvme"):
        config = load_config(zero(offload_optimizer=NVME) | ours)
    assert config.patrickstar.memory.disk is not None
    assert config.patrickstar.memory.disk.path == Path("/scratch")


def test_the_same_disk_twice_needs_no_warning() -> None:
    ours = {"patrickstar": {"memory": {"disk": "/local_nvme:1GiB"}}}
    disk = silently(zero(offload_optimizer=NVME) | ours).patrickstar.memory.disk
    assert disk is not None
    assert disk.size == 2**30


def test_patrickstar_memory_disk_stands_in_for_a_missing_nvme_path() -> None:
    ours = {"patrickstar": {"memory": {"disk": "/scratch"}}}
    disk = silently(zero(offload_param={"device": "nvme"}) | ours).patrickstar.memory.disk
    assert disk is not None
    assert disk.path == Path("/scratch")


def test_there_is_one_disk_tier_so_of_two_paths_one_is_taken_with_a_warning() -> None:
    other = {"device": "nvme", "nvme_path": "/other"}
    with pytest.warns(ConfigWarning, match="/other"):
        config = load_config(zero(offload_optimizer=NVME, offload_param=other))
    assert config.patrickstar.memory.disk is not None
    assert config.patrickstar.memory.disk.path == Path("/local_nvme")


def test_pin_memory_is_on_by_default() -> None:
    section = load_config(zero(offload_optimizer={"device": "cpu"})).zero_optimization
    assert section.offload_optimizer is not None
    assert section.offload_optimizer.pin_memory is True


@pytest.mark.parametrize("device", ["gpu", "CPU", 3, None])
def test_an_unknown_device_names_the_known_ones(device: Any) -> None:
    with pytest.raises(ConfigError, match=r"offload_param\.device") as raised:
        load_config(zero(offload_param={"device": device}))
    assert all(name in str(raised.value) for name in ("none", "cpu", "nvme"))


@pytest.mark.parametrize(
    "old, block", [("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")]
)
def test_the_old_switches_are_honoured_with_a_warning(old: str, block: str) -> None:
    with pytest.warns(ConfigWarning, match=rf"{old}.*{block}"):
        section = load_config(zero(**{old: True})).zero_optimization
    offload = getattr(section, block)
    assert offload is not None
    assert offload.device == "cpu"


def test_true_is_the_old_way_to_ask_for_stage_1() -> None:
    with pytest.warns(ConfigWarning, match="zero_optimization"):
        assert load_config({"zero_optimization": True}).zero_optimization.stage == 1


@pytest.mark.parametrize(
    "key, value",
    [
        ("contiguous_gradients", True),
        ("reduce_bucket_size", 1e8),
        ("sub_group_size", 1e8),
        ("stage3_max_live_parameters", 0),
        ("max_live_parameters", 0),
        ("stage3_prefetch_bucket_size", 5e6),
        ("round_robin_gradients", True),
    ],
)
def test_a_key_without_effect_says_why(key: str, value: Any) -> None:
    with pytest.warns(ConfigWarning, match=rf"zero_optimization\.{key}: \S+"):
        load_config(zero(**{key: value}))


def test_a_type_is_checked_even_where_the_key_has_no_effect() -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.reduce_bucket_size.*'large'"):
        load_config(zero(reduce_bucket_size="large"))


def test_auto_is_no_reason_to_warn() -> None:
    silently(zero(reduce_bucket_size="auto", stage3_prefetch_bucket_size="auto"))


@pytest.mark.parametrize("key", ["zero_quantized_gradients", "zero_quantized_weights"])
def test_what_would_change_the_numbers_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"zero_optimization\.{key}"):
        load_config(zero(**{key: True}))
    silently(zero(**{key: False}))
