"""Held against an installed DeepSpeed: no key is missing, none is invented, defaults agree."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import pytest

from patrickstar.config import ConfigWarning, load_config
from patrickstar.config.key import UNSET, Status
from patrickstar.config.keys import TABLE
from patrickstar.config.removed import OTHER_KEYS as REMOVED
from patrickstar.config.scheduler import Scheduler
from patrickstar.errors import ConfigError

from ..optim.deepspeed_oracle import deepspeed_module
from .deepspeed_keys import Found, Module, asked_for, constants, declared

# Sections that are on, so that DeepSpeed looks into them.
_FULL: dict[str, Any] = {
    "train_batch_size": 1,
    "optimizer": {"type": "Adam", "params": {}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "torch_autocast": {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": []},
    "aio": {},
    "activation_checkpointing": {},
    "flops_profiler": {"enabled": True},
    "autotuning": {"enabled": False, "model_info": {}},
    "checkpoint": {"writer": {}, "parallel_write": {}},
    "data_types": {},
    "comms_logger": {},
    "timers": {"throughput": {}},
    "pipeline": {},
    "expert_parallel": {"enabled": False},
    "data_efficiency": {
        "enabled": True,
        "data_sampling": {
            "enabled": True,
            "curriculum_learning": {"enabled": True, "curriculum_metrics": {}},
            "dynamic_batching": {"enabled": True, "max_tokens": 1, "metrics_path": ""},
        },
        "data_routing": {"enabled": True, "random_ltd": {"enabled": True}},
    },
}

_OLD: dict[str, Any] = {"train_batch_size": 1, "zero_optimization": True}


@pytest.fixture(name="module")
def _module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """Imports a module of DeepSpeed by its name inside the package, or skips the test."""
    return functools.partial(deepspeed_module, monkeypatch=monkeypatch)


def test_every_field_of_deepspeeds_models_is_in_the_table(module: Module) -> None:
    paths = {found.path for found in declared(module)}
    assert len(paths) > 150
    assert paths - TABLE.keys() == set()


def test_every_key_that_deepspeed_asks_a_config_for_is_in_the_table(module: Module) -> None:
    paths = asked_for(module, _FULL)
    assert len(paths) > 120
    assert paths - TABLE.keys() == set()


def test_every_constant_that_names_a_key_is_in_the_table(module: Module) -> None:
    names = {key.name for key in TABLE.values()}
    found = {found.path for found in constants(module)}
    assert len(found) > 80
    assert found - names == set()


def test_every_key_that_deepspeed_has_removed_is_refused(module: Module) -> None:
    config = module("runtime.config")
    top = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    zero = {f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS}
    assert {key.path for key in REMOVED} == top
    assert all(TABLE[path].status is Status.REJECTED for path in top | zero)


def test_defaults_in_the_table_are_deepspeeds(module: Module) -> None:
    wrong = [
        f"{found.path}: {TABLE[found.path].default!r} is {found.default!r} in DeepSpeed"
        for found in declared(module)
        if not _agrees(found, TABLE[found.path].default)
    ]
    assert wrong == []


def test_defaults_of_constants_are_among_those_of_their_name(module: Module) -> None:
    models = {one.path.rpartition(".")[2] for one in declared(module)}
    for found in constants(module):
        if found.path in models:
            continue  # what counts is the model, and some constants were left behind
        rows = [key for key in TABLE.values() if key.name == found.path]
        assert any(_agrees(found, key.default) for key in rows), (found, rows)


def test_the_defaults_that_moved_in_2026_are_the_new_ones(module: Module) -> None:
    assert module("runtime.constants").GRADIENT_CLIPPING_DEFAULT == 1.0
    assert load_config({}).gradient_clipping == 1.0
    offload = module("runtime.zero.offload_config").DeepSpeedZeroOffloadOptimizerConfig()
    assert offload.pin_memory is True
    ours = load_config({"zero_optimization": {"offload_optimizer": {}}}).zero_optimization
    assert ours.offload_optimizer is not None
    assert ours.offload_optimizer.pin_memory is True


def test_no_key_is_in_the_table_that_deepspeed_does_not_know(module: Module) -> None:
    known = {found.path for found in declared(module)}
    known |= asked_for(module, _FULL) | asked_for(module, _OLD)
    names = {found.path for found in constants(module)} | _schedule_parameters(module)
    removed = module("runtime.config")._REMOVED_ZERO_CONFIG_KEYS
    invented = {
        key.path
        for key in TABLE.values()
        if key.default is not UNSET
        and key.path not in known
        and key.name not in names
        and key.name not in removed
        and key.parent != "optimizer.params"  # depends on the optimizer
    }
    # Constants without a default, and sections that are only looked into when they are on.
    assert {path for path in invented if not path.startswith("data_efficiency.")} == set()


def test_schedules_and_their_parameters_are_deepspeeds(module: Module) -> None:
    schedules = module("runtime.lr_schedules")
    assert set(Scheduler.spellings) == set(schedules.VALID_LR_SCHEDULES)
    ours = {key.name for key in TABLE.values() if key.parent == "scheduler.params"}
    assert _schedule_parameters(module) == ours


def test_every_optimizer_of_deepspeed_has_a_spelling_or_is_refused_by_name(module: Module) -> None:
    from patrickstar.optim import rule_named

    for name in module("runtime.config").DEEPSPEED_OPTIMIZERS:
        kind = load_config({"optimizer": {"type": name}}).optimizer
        assert kind is not None
        if name.startswith("mu") and name != "muon":
            with pytest.raises(ConfigError, match="use"):
                rule_named(kind.type, kind.params)
        else:
            assert rule_named(kind.type, kind.params)[0].name.lower().startswith(name[:4])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batch_sizes_are_resolved_as_deepspeed_does(
    module: Module, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    config = module("runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)

    class Ranks:
        @staticmethod
        def get_data_parallel_world_size() -> int:
            return world_size

    values = (None, 1, 2, 3, 4, 6, 12)
    for train in values:
        for micro in values:
            for steps in values:
                given = {
                    name: value
                    for name, value in (
                        ("train_batch_size", train),
                        ("train_micro_batch_size_per_gpu", micro),
                        ("gradient_accumulation_steps", steps),
                    )
                    if value is not None
                }
                if train is None and micro is None:
                    continue  # an error there, a micro-batch of 1 here
                try:
                    theirs = config.DeepSpeedConfig(dict(given), mpu=Ranks())
                except AssertionError:
                    with pytest.raises(ConfigError):
                        load_config(given, world_size=world_size)
                else:
                    ours = load_config(given, world_size=world_size)
                    for name in (
                        "train_batch_size",
                        "train_micro_batch_size_per_gpu",
                        "gradient_accumulation_steps",
                    ):
                        assert getattr(ours, name) == getattr(theirs, name), given


def test_what_deepspeed_reads_from_a_config_is_what_we_read(module: Module) -> None:
    given = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "steps_per_print": 10,
        "prescale_gradients": True,
        "gradient_predivide_factor": 2.0,
        "wall_clock_breakdown": True,
        # auto_cast is said: left out, inputs are cast here and are not there.
        "fp16": {"enabled": True, "auto_cast": True, "loss_scale_window": 200, "hysteresis": 3},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9]}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "csv_monitor": {"enabled": True, "output_path": "there"},
        "dataloader_drop_last": True,
    }
    theirs = module("runtime.config").DeepSpeedConfig(given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        ours = load_config(given)
    for name in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "steps_per_print",
        "prescale_gradients",
        "gradient_predivide_factor",
        "wall_clock_breakdown",
        "grad_accum_dtype",
        "dataloader_drop_last",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in type(ours.fp16).model_fields:
        assert getattr(ours.fp16, name) == getattr(theirs.float16_config, name), name
    for name in type(ours.csv_monitor).model_fields:
        assert getattr(ours.csv_monitor, name) == getattr(theirs.monitor_config.csv_monitor, name)
    assert ours.zero_optimization.stage == theirs.zero_config.stage
    assert ours.zero_optimization.offload_optimizer is not None
    assert ours.zero_optimization.offload_optimizer.device == "cpu"


def _agrees(found: Found, ours: Any) -> bool:
    if found.default is ... or ours is UNSET:
        return True
    if isinstance(found.default, dict) and ours == {}:
        return True  # a section, whose keys have rows of their own
    if found.path.endswith("leaf_module.classes"):
        return isinstance(ours, str)  # described, not listed
    if found.path.endswith("tensor_parallel.dtype"):
        return str(found.default) == "torch.float16" and ours == "fp16"
    return bool(found.default == ours)


def _schedule_parameters(module: Module) -> set[str]:
    schedules = module("runtime.lr_schedules")
    return {
        parameter
        for name in schedules.VALID_LR_SCHEDULES
        for parameter in inspect.signature(getattr(schedules, name).__init__).parameters
    } - {"self", "optimizer"}
