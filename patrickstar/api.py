"""The calls that users make."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from patrickstar.config import load_config
from patrickstar.engine.engine import Engine
from patrickstar.engine.from_config import muon_groups, settings_from
from patrickstar.engine.initialize import ParamGroups, make_engine
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.errors import ConfigError
from patrickstar.optim import Muon

Provider = Callable[[], nn.Module] | nn.Module


def initialize_engine(
    model_provider: Provider | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    param_groups: ParamGroups | None = None,
    model_func: Provider | None = None,
    local_rank: int | None = None,
) -> tuple[Engine, ChunkedOptimizer]:
    """Build a model under memory budgets and get it ready for training.

    Args:
        model_provider: a callable that builds and returns the model, or a ready `nn.Module`. A
            callable's parameters go straight into chunks, so the model may be larger than memory.
        config: a dict or the path of a JSON file, with DeepSpeed's keys and the section
            "patrickstar" for memory budgets; see docs/deepspeed-config.md.
        param_groups: called with the model; returns parameter groups as `torch.optim` takes them,
            each with `params` and hyperparameters that differ from the config's.
        model_func: the name that the original PatrickStar had for `model_provider`.
        local_rank: accepted for the same reason; the launcher's environment is what counts.

    Returns:
        the engine, which behaves as the model, and its optimizer.

    Raises:
        ConfigError: a key, value or model that cannot work.
        BudgetError: a memory budget is too small; it says the smallest that works.
        SpoolError: the disk tier cannot be set up.
    """
    if (model_provider is None) == (model_func is None):
        raise ConfigError(
            "initialize_engine needs model_provider=<callable or nn.Module> (model_func= is its "
            "old name); give one of the two"
        )
    provider = model_provider if model_provider is not None else model_func
    assert provider is not None
    loaded = load_config(dict(config) if isinstance(config, Mapping) else (config or {}))
    settings = settings_from(loaded)
    if param_groups is None and isinstance(settings.rule, Muon):
        assert loaded.optimizer is not None
        param_groups = functools.partial(muon_groups, settings.rule, dict(loaded.optimizer.params))
    return make_engine(provider, settings, param_groups)
