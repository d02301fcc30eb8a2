"""`deepspeed.zero.Init`: a context in which modules are built straight into chunks.

What waits for the later `initialize` is described in `engine.ahead`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from patrickstar.config import load_config
from patrickstar.engine.ahead import Ahead
from patrickstar.engine.construct import into
from patrickstar.engine.from_config import settings_from
from patrickstar.engine.initialize import building

GivenConfig = Mapping[str, Any] | str | os.PathLike[str] | None


class Init:
    """`deepspeed.zero.Init`: inside, modules are built straight into chunks.

    Args:
        module: a ready module; its parameters are moved into chunks at once.
        config_dict_or_path: the config that `initialize` will get; its memory budgets hold while
            the model is built. Without it host memory is the only tier and has no limit.
        config: the old name of `config_dict_or_path`.
        enabled: without it nothing happens.
        others: DeepSpeed's other arguments, such as `remote_device`, `dtype`,
            `data_parallel_group` and `mpu`. They are accepted: where a chunk lives is the memory
            budgets' business, and its dtype that of `initialize`.

    Raises:
        ConfigError: the config cannot work.
        BudgetError: a budget is too small to build the model in.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: GivenConfig = None,
        config: GivenConfig = None,
        enabled: bool = True,
        **others: Any,
    ) -> None:
        self._entered: list[AbstractContextManager[None]] = []
        self._enabled = enabled
        self._config = config if config is not None else config_dict_or_path
        if module is not None and enabled:
            ahead = begin(self._config)
            for parameter in list(module.parameters()):
                ahead.nursery.adopt(parameter)

    def __enter__(self) -> None:
        if self._enabled:
            building = into(begin(self._config).nursery)
            building.__enter__()
            self._entered.append(building)

    def __exit__(self, *raised: Any) -> None:
        if self._enabled:
            self._entered.pop().__exit__(*raised)


def begin(config: GivenConfig) -> Ahead:
    """Tiers, a manager and a nursery under the budgets of `config`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `initialize` says the same of the same config
        given: Any = {} if config is None else config
        loaded = load_config(dict(given) if isinstance(given, Mapping) else given)
    ahead = building(settings_from(loaded))
    ahead.home.ahead = ahead
    return ahead
