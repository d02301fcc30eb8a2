"""A refused budget as the command line tells it: one number for the whole run, and its option.

An engine that is refused while it is made knows no batch, so what it names is for the model alone.
The command line knows the batch: it asks the planner for what the run takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from patrickstar.cli.model_choice import ModelChoice
from patrickstar.config import load_config
from patrickstar.engine.device import free_budget
from patrickstar.engine.from_config import settings_from
from patrickstar.engine.sizing import memory_of
from patrickstar.errors import BudgetError, ConfigError
from patrickstar.memory.sizes import format_budget, size_at_least
from patrickstar.planning.rehearsed import rehearse_run

_OPTIONS = {"device": "--device-memory", "host": "--host-memory", "disk": "--disk PATH:SIZE"}


@contextmanager
def while_made(
    choice: ModelChoice, config: Mapping[str, Any], batch: int, length: int, *, ranks: int
) -> Iterator[None]:
    """Around making an engine: a budget is refused with the smallest that the whole run works with.

    Args:
        batch, length: sequences of a micro-batch, and tokens of each.
        ranks: with more than one, what is gathered is not known, and the error stays as it is.

    Raises:
        BudgetError: instead of the engine's.
    """
    try:
        yield
    except BudgetError as error:
        if ranks > 1 or error.tier not in ("device", "host"):
            raise
        try:
            smallest = max(error.smallest, _smallest(error.tier, choice, config, batch, length))
        except ConfigError:  # what it does depends on its data: no plan knows it
            raise error from None
        option = _OPTIONS[error.tier]
        disk = "" if "disk" in _memory(config) else "--disk FOLDER, "
        raise BudgetError(
            f"the {error.tier} budget of {format_budget(error.budget)} is too small for "
            f"{choice.name} in micro-batches of {batch} x {length} tokens. The smallest that works "
            f"is {option} {size_at_least(smallest)} (patrickstar.memory.{error.tier}). Less would "
            f"do with {disk}--checkpoint-activations, a smaller --batch-size or a smaller "
            "--sequence-length",
            tier=error.tier,
            budget=error.budget,
            smallest=smallest,
        ) from error


@contextmanager
def while_trained() -> Iterator[None]:
    """Around training: an error about a budget says which option sets it.

    Raises:
        BudgetError: instead of the engine's.
    """
    try:
        yield
    except BudgetError as error:
        option = _OPTIONS.get(error.tier, "its option")
        raise BudgetError(
            f"{str(error).rstrip('.')}. Set the budget with {option} "
            f"(patrickstar.memory.{error.tier})",
            tier=error.tier,
            budget=error.budget,
            smallest=error.smallest,
        ) from error


def _smallest(
    tier: str, choice: ModelChoice, config: Mapping[str, Any], batch: int, length: int
) -> int:
    """Bytes of `tier` that a run with `config` works with."""
    settings = settings_from(load_config(config))
    if settings.device is not None and settings.device_budget is None:
        settings = replace(settings, device_budget=free_budget(settings.device))
    tokens = torch.zeros(batch, length, dtype=torch.long, device="meta")
    needs = rehearse_run(choice.build, ((tokens, tokens), {}), settings).needs
    names, budgets = memory_of(settings)
    return needs.judge(budgets).smallest[names.index(tier)]


def _memory(config: Mapping[str, Any]) -> Mapping[str, Any]:
    memory = (config.get("patrickstar") or {}).get("memory") or {}
    return {tier: value for tier, value in memory.items() if value is not None}
