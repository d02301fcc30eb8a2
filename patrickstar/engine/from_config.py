"""What a config means for the engine."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import nn

from patrickstar.config import Config
from patrickstar.engine.device import device_named
from patrickstar.engine.initialize import RunSettings
from patrickstar.engine.precision import Precision
from patrickstar.engine.safe_modules import safe_classes
from patrickstar.errors import ConfigError
from patrickstar.memory import Fifo, FurthestNextUse, Lru, Policy
from patrickstar.optim import (
    Muon,
    is_muon_parameter,
    make_loss_scale,
    muon_hyper,
    rule_named,
    schedule_named,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def settings_from(config: Config) -> RunSettings:
    """Resolve `config` to what the engine needs."""
    ours = config.patrickstar
    cast = config.precision != "fp16" or config.fp16.auto_cast is not False
    precision = Precision(
        config.precision, _loss_scale(config), cast=cast, autocast=_autocast(config)
    )
    kind = config.optimizer.type if config.optimizer is not None else "AdamW"
    params = dict(config.optimizer.params) if config.optimizer is not None else {}
    rule, hyper = rule_named(kind, params, deepspeed_exact=ours.deepspeed_exact)
    grad_dtype = precision.dtype
    if config.grad_accum_dtype is not None and precision.low:
        grad_dtype = DTYPES[config.grad_accum_dtype]
    disk = ours.memory.disk
    device = device_named(ours.device)
    update_on = ours.update
    if update_on == "auto":
        update_on = "host" if device is None or ours.memory.device is not None else "device"
    return RunSettings(
        precision=precision,
        rule=rule,
        hyper=hyper,
        groups_of=functools.partial(_muon_groups, rule, params) if isinstance(rule, Muon) else None,
        clipping=config.gradient_clipping,
        accumulation_steps=config.gradient_accumulation_steps,
        device_budget=ours.memory.device,
        host_budget=ours.memory.host,
        disk=None if disk is None else (disk.path, disk.size),
        verify_disk=disk is None or disk.verify,
        chunk_limit=None if ours.chunk_size == "auto" else int(ours.chunk_size),
        policy=policy_named(ours.policy),
        plan=ours.policy not in ("lru", "fifo"),
        prefetch=ours.prefetch,
        overlap_update=ours.overlap_update,
        update_in_backward=ours.update_in_backward,
        grad_dtype=grad_dtype,
        round_masters=ours.deepspeed_exact,
        exact=ours.deepspeed_exact,
        piece_size=ours.piece_size,
        device=device,
        pin_host=_pins_host(config),
        update_on=update_on,
        record=ours.record,
        carry_inputs=config.activation_checkpointing.cpu_checkpointing,
        skip_overflow=_skips_overflow(config),
        make_scheduler=(
            None
            if config.scheduler is None or config.scheduler.type is None
            else schedule_named(config.scheduler.type, dict(config.scheduler.params))
        ),
    )


def _muon_groups(rule: Muon, params: dict[str, Any], module: nn.Module) -> list[dict[str, Any]]:
    """The two parameter groups of Muon: matrices, and everything else."""
    groups = []
    for use_muon in (True, False):
        members = [
            p
            for name, p in module.named_parameters()
            if p.requires_grad and is_muon_parameter(name, p.shape) is use_muon
        ]
        groups.append({"params": members, **muon_hyper(rule, params, use_muon=use_muon)})
    return groups


def policy_named(name: str) -> Policy:
    """ "planned", "lru", "fifo", or the class "package.module:Class"."""
    known: dict[str, type[Policy]] = {"planned": FurthestNextUse, "lru": Lru, "fifo": Fifo}
    if name in known:
        return known[name]()
    module, _, attribute = name.partition(":")
    try:
        made: Policy = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"patrickstar.policy: {name!r} cannot be loaded ({error}); use 'planned', 'lru', "
            "'fifo', or 'package.module:Class' with a class that takes no arguments"
        ) from error
    return made


def _loss_scale(config: Config) -> Any:
    if config.precision != "fp16":
        return None
    fp16 = config.fp16
    return make_loss_scale(
        fp16.loss_scale,
        initial_scale_power=fp16.initial_scale_power,
        loss_scale_window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_loss_scale=fp16.min_loss_scale,
        deepspeed_exact=config.patrickstar.deepspeed_exact,
    )


def _skips_overflow(config: Config) -> bool:
    """Whether an update without a loss scale is skipped where a gradient is not finite.

    DeepSpeed's stage 3 never looks at gradients in bf16.
    """
    blind = config.patrickstar.deepspeed_exact and config.zero_optimization.stage == 3
    return config.precision == "bf16" and config.bf16.check_grad_overflow and not blind


def _pins_host(config: Config) -> bool:
    """Whether host memory is page-locked for an accelerator: unless an offload block says no."""
    zero = config.zero_optimization
    return all(
        block is None or block.pin_memory for block in (zero.offload_param, zero.offload_optimizer)
    )


def _autocast(config: Config) -> torch.dtype | None:
    wanted = config.torch_autocast
    if not wanted.enabled:
        return None
    if config.precision != "fp32" or wanted.dtype not in (None, "bf16"):
        raise ConfigError(
            "torch_autocast computes in bf16 over fp32 weights here: turn fp16 and bf16 off and "
            "set torch_autocast.dtype to 'bfloat16', or use the section fp16, which has a loss "
            "scale"
        )
    safe_classes(config)  # refused on one rank, too, where nothing travels
    return torch.bfloat16
