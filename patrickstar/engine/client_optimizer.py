"""Optimizers and schedulers that a script made itself, taken over by the engine.

DeepSpeed's scripts may pass a ready `torch.optim.Optimizer`. Its formula, hyperparameters and
parameter groups are what counts; its states would be whole tensors in memory, so the update is made
by the chunked rule with the same formula.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from patrickstar.errors import ConfigError
from patrickstar.optim import SGD, Adam, AdamW, TorchRule, UpdateRule
from patrickstar.optim.rule_optimizer import RuleOptimizer

_OWN: dict[type[torch.optim.Optimizer], Callable[[], UpdateRule]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
}
_NO_FORMULA = {
    "params",
    "fused",
    "foreach",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
}


def rule_of(optimizer: torch.optim.Optimizer) -> tuple[UpdateRule, dict[str, Any]]:
    """The rule with the formula of `optimizer`, and its default hyperparameters.

    Raises:
        ConfigError: it has been stepped already, or its update is not elementwise.
    """
    if any(optimizer.state.values()):
        raise ConfigError(
            "the optimizer passed to initialize has been stepped before; its states cannot be "
            "taken over. Pass a new one, and load states with load_checkpoint"
        )
    rule = _rule_with_its_formula(optimizer)
    known = rule.defaults
    given = {k: v for k, v in optimizer.defaults.items() if k in known}
    return rule, {**known, **given}


def _rule_with_its_formula(optimizer: torch.optim.Optimizer) -> UpdateRule:
    if isinstance(optimizer, RuleOptimizer):
        return optimizer.rule
    make = _OWN.get(type(optimizer))
    if make is None:
        return TorchRule(type(optimizer))
    if make is Adam and optimizer.defaults.get("decoupled_weight_decay"):
        return AdamW()
    return make()


def groups_of(
    optimizer: torch.optim.Optimizer, module: nn.Module
) -> Callable[[nn.Module], Sequence[Mapping[str, Any]]]:
    """The parameter groups of `optimizer`, for the engine; the module must hold their members."""
    members = {id(p) for p in module.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in members:
                raise ConfigError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is "
                    "not in the model; build it over model.parameters()"
                )

    def groups(_: nn.Module) -> Sequence[Mapping[str, Any]]:
        return [
            {k: v for k, v in group.items() if k == "params" or k not in _NO_FORMULA}
            for group in optimizer.param_groups
        ]

    return groups


def scheduler_for(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler, or what makes one, bound to the engine's optimizer."""
    if scheduler is None:
        return None
    if callable(scheduler) and not hasattr(scheduler, "step"):
        return scheduler(optimizer)
    theirs = getattr(scheduler, "optimizer", None)
    if theirs is not None:
        for ours, group in zip(optimizer.param_groups, theirs.param_groups, strict=False):
            for key in ("lr", "initial_lr", "momentum", "betas"):
                if key in group:
                    ours[key] = group[key]
        _bind(scheduler, optimizer)
        _let_torch_see_steps(optimizer)
    return scheduler


def _bind(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Also what it is made of, as `SequentialLR` and `ChainedScheduler` are of others."""
    scheduler.optimizer = optimizer
    for part in getattr(scheduler, "_schedulers", ()):
        _bind(part, optimizer)


def _let_torch_see_steps(optimizer: Any) -> None:
    """A torch scheduler warns unless it has wrapped its optimizer's `step` when it was made."""
    step = optimizer.step

    @functools.wraps(step)
    def seen(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return step(*args, **kwargs)

    seen._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = seen
