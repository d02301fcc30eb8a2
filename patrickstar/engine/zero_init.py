"""`deepspeed.zero.Init`: a context in which modules are built straight into chunks.

What waits for the later `initialize` is described in `engine.ahead`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from patrickstar.comm import Communicator
from patrickstar.comm.communicator import DEFAULT_TIMEOUT
from patrickstar.config import load_config
from patrickstar.engine.ahead import Ahead
from patrickstar.engine.construct import Nursery, into
from patrickstar.engine.from_config import settings_from
from patrickstar.engine.initialize import building
from patrickstar.engine.launch import among_ranks, connect, world_size
from patrickstar.engine.one_host import shared

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
        self._entered: list[AbstractContextManager[Nursery]] = []
        self._enabled = enabled
        self._config = config if config is not None else config_dict_or_path
        if module is not None and enabled:
            with _into(begin(self._config).nursery) as nursery:
                for parameter in list(module.parameters()):
                    nursery.adopt(parameter)

    def __enter__(self) -> None:
        if self._enabled:
            building = _into(begin(self._config).nursery)
            building.__enter__()
            self._entered.append(building)

    def __exit__(self, *raised: Any) -> None:
        if self._enabled:
            self._entered.pop().__exit__(*raised)


@contextmanager
def _into(nursery: Nursery) -> Iterator[Nursery]:
    """As `construct.into`, and the last chunks are shared with the other ranks, too."""
    with into(nursery):
        yield nursery
    nursery.complete()


def begin(config: GivenConfig) -> Ahead:
    """Tiers, a manager and a nursery under the budgets of `config`.

    Several ranks share the chunks if `config` is for ZeRO stage 3, or if there is none, since this
    context is a part of stage 3.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `initialize` says the same of the same config
        given: Any = {} if config is None else config
        loaded = load_config(
            dict(given) if isinstance(given, Mapping) else given, world_size=world_size()
        )
    settings = settings_from(loaded)
    if world_size() > 1:
        connect(settings.device, DEFAULT_TIMEOUT)
        comm = Communicator.open(device="cpu")  # modules are built in CPU memory
        if config is None or loaded.zero_optimization.stage == 3:
            settings = among_ranks(settings, comm, loaded)
        else:
            with comm:
                settings = shared(settings, comm)
    ahead = building(settings)
    ahead.home.ahead = ahead
    return ahead
