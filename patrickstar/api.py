"""The calls that users make."""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from patrickstar.comm import Communicator
from patrickstar.comm.communicator import DEFAULT_TIMEOUT
from patrickstar.config import Config, load_config
from patrickstar.engine.client_optimizer import groups_of, rule_of, scheduler_for
from patrickstar.engine.device import device_named
from patrickstar.engine.engine import Engine
from patrickstar.engine.from_config import settings_from
from patrickstar.engine.initialize import ParamGroups, make_engine
from patrickstar.engine.launch import among_ranks, backend_for, is_launched, join, world_size
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.engine.rendezvous import join_group
from patrickstar.engine.telling import Telling, telling_of
from patrickstar.errors import ConfigError
from patrickstar.optim import UpdateRule

Provider = Callable[[], nn.Module] | nn.Module


def initialize_engine(
    model_provider: Provider | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    param_groups: ParamGroups | None = None,
    model_func: Provider | None = None,
    local_rank: int | None = None,
    communicator: Communicator | None = None,
) -> tuple[Engine, ChunkedOptimizer]:
    """Build a model under memory budgets and get it ready for training.

    Under `torchrun`, or in a process group that exists already, the run is data parallel over all
    ranks: each makes the same calls, with batches of its own. See docs/several-gpus.md.

    Args:
        model_provider: a callable that builds and returns the model, or a ready `nn.Module`. A
            callable's parameters go straight into chunks, so the model may be larger than memory.
        config: a dict or the path of a JSON file, with DeepSpeed's keys and the section
            "patrickstar" for memory budgets; see docs/deepspeed-config.md.
        param_groups: called with the model; returns parameter groups as `torch.optim` takes them,
            each with `params` and hyperparameters that differ from the config's.
        model_func: the name that the original PatrickStar had for `model_provider`.
        local_rank: accepted for the same reason; the launcher's environment is what counts.
        communicator: connects the ranks of this run, where they are not all ranks of the process
            group or shard in groups; it stays open when the engine is closed.

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
    size = world_size() if communicator is None else len(communicator.topology.ranks)
    loaded = _load(config or {}, size)
    return _start(provider, loaded, param_groups, communicator=communicator)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[Engine, ChunkedOptimizer, Any, Any]:
    """`deepspeed.initialize`, so that `import patrickstar as deepspeed` runs its scripts.

    Args:
        args: may carry `deepspeed_config`, the path of the config.
        model: the module to train.
        optimizer: a ready `torch.optim.Optimizer`, or a callable that makes one of the parameters;
            its formula, hyperparameters and groups replace the config's.
        model_parameters: the parameters, or groups of them, to train; all by default.
        training_data: a dataset; a loader of micro-batches is made of it.
        lr_scheduler: a ready scheduler, or a callable that makes one of the optimizer.
        distributed_port, mpu, dist_init_required, mesh_param: accepted; all ranks that were
            launched train together.
        collate_fn: for the loader.
        config, config_params: a dict or the path of a JSON file; the second is its old name.

    Returns:
        the engine, its optimizer, the loader (None without `training_data`) and the scheduler.

    Raises:
        ConfigError: as `initialize_engine`.
    """
    if model is None:
        raise ConfigError("initialize needs model=<nn.Module>")
    given = config if config is not None else config_params
    if given is None:
        given = getattr(args, "deepspeed_config", None)
    if given is None:
        raise ConfigError("initialize needs config=<dict or path>, or args.deepspeed_config")
    loaded = _load(given, world_size())
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model_parameters or model.parameters())
    groups: ParamGroups | None = None
    client = None
    if optimizer is not None:
        client, groups = rule_of(optimizer), groups_of(optimizer, model)
    elif model_parameters is not None:
        groups = _groups_given(list(model_parameters))
    engine, chunked = _start(model, loaded, groups, client)
    made = scheduler_for(lr_scheduler, chunked)
    if made is not None:
        engine.schedule_with(made)
    if training_data is not None:
        sampler: Any = None
        if not isinstance(training_data, torch.utils.data.IterableDataset):
            # Also on one rank: DeepSpeed shuffles by this sampler, in an order of its own.
            sampler = torch.utils.data.DistributedSampler(
                training_data, engine.world_size, engine.global_rank
            )
        engine.training_dataloader = torch.utils.data.DataLoader(
            training_data,
            batch_size=loaded.train_micro_batch_size_per_gpu,
            collate_fn=collate_fn,
            shuffle=False,
            sampler=sampler,
            drop_last=loaded.dataloader_drop_last,
        )
    return engine, chunked, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Give a script's parser `--deepspeed` and `--deepspeed_config FILE`."""
    group = parser.add_argument_group("DeepSpeed", "configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="accepted; the engine is used")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of a JSON config")
    return parser


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make the process group, as `deepspeed.init_distributed`; does nothing if there is one.

    Under a launcher its environment (RANK, WORLD_SIZE, MASTER_ADDR) is used; a process without one
    is a group of its own.

    Args:
        dist_backend: by default "gloo", and the accelerator's own beside it if there is one.
        timeout: of a collective.
        dist_init_required: False makes no group.
        init_method, rank, world_size: as for `torch.distributed.init_process_group`.
        auto_mpi_discovery, distributed_port, verbose, config: accepted.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    backend = dist_backend or backend_for(device_named("auto"))
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if init_method is not None or rank >= 0:
        options |= {"init_method": init_method, "rank": rank, "world_size": world_size}
    elif is_launched():
        join_group(backend, timeout)
        return
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        options |= {"store": alone, "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **options)


def _load(config: Mapping[str, Any] | str | os.PathLike[str], size: int) -> Config:
    given = dict(config) if isinstance(config, Mapping) else config
    return load_config(given, world_size=size)


def _groups_given(given: list[Any]) -> ParamGroups:
    if given and isinstance(given[0], Mapping):
        return lambda module: given
    return lambda module: [{"params": [p for p in given if p.requires_grad]}]


def _start(
    provider: Provider,
    config: Config,
    param_groups: ParamGroups | None,
    client: tuple[UpdateRule, dict[str, Any]] | None = None,
    communicator: Communicator | None = None,
) -> tuple[Engine, ChunkedOptimizer]:
    settings = settings_from(config)
    if client is not None:
        settings = replace(settings, rule=client[0], hyper=client[1], groups_of=None)
    comm = join(settings.device, DEFAULT_TIMEOUT) if communicator is None else communicator
    telling: Telling | None = None
    try:
        if comm is not None:
            settings = among_ranks(settings, comm, config)
        first = settings.ranks is None or settings.ranks.is_first
        telling = telling_of(config, settings.device or torch.device("cpu"), first=first)
        engine, optimizer = make_engine(provider, settings, param_groups)
    except BaseException:
        if telling is not None:
            telling.close()
        if comm is not None and communicator is None:
            comm.close()
        raise
    engine.config, engine.telling = config, telling
    if communicator is None:
        engine.communicator = comm
    return engine, optimizer
