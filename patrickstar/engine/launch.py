"""Finding the other ranks of a run.

`torchrun` and its like tell each process its place in the environment. A process group that exists
already is used as it is.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import replace

import torch
import torch.distributed as dist

from patrickstar.comm import Communicator, ShardedComm
from patrickstar.config import Config
from patrickstar.engine.from_config import DTYPES
from patrickstar.engine.initialize import RunSettings
from patrickstar.engine.one_host import shared
from patrickstar.engine.ranks import Ranks
from patrickstar.engine.rendezvous import join_group
from patrickstar.engine.safe_modules import safe_classes
from patrickstar.errors import ConfigError

_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether a launcher has told this process its place among others."""
    return all(name in os.environ for name in _TOLD)


def world_size() -> int:
    """How many ranks there are, connected or about to be."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def rank() -> int:
    """This process among them, from 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if world_size() > 1 else 0


def backend_for(device: torch.device | None) -> str:
    """What `torch.distributed` calls the backends of a run on `device`; None for the CPU."""
    if device is None:
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"


def connect(device: torch.device | None, timeout: float) -> bool:
    """Make the process group of the ranks that were launched, unless there is one.

    Args:
        device: the accelerator that this rank computes on; None for the CPU.
        timeout: seconds that a collective may take.

    Returns:
        Whether there are other ranks.

    Raises:
        ConfigError: the launcher's environment contradicts itself.
        CommError: a rank did not come.
    """
    if world_size() == 1:
        return False
    if not dist.is_initialized():
        if not 0 <= rank() < world_size():
            raise ConfigError(
                f"RANK={rank()} is none of the {world_size()} ranks that WORLD_SIZE tells of"
            )
        join_group(backend_for(device), datetime.timedelta(seconds=timeout))
    return True


def join(device: torch.device | None, timeout: float) -> Communicator | None:
    """Connect with the other ranks that were launched; None if there are none. See `connect`."""
    if not connect(device, timeout):
        return None
    return Communicator.open(device=device or "cpu", timeout=timeout)


def among_ranks(settings: RunSettings, comm: Communicator, config: Config) -> RunSettings:
    """`settings` for one of several ranks.

    Those on one host share its budgets for memory and disk; each has a device of its own. The first
    one is recorded.

    Raises:
        ConfigError: other ranks may hold other parts of the model, and clipping by the norm of
            these alone was not asked for.
    """
    _refuse_partial_norms(comm, config)
    size = len(comm.topology.ranks)
    predivide = float(size) if config.prescale_gradients else config.gradient_predivide_factor
    name = config.communication_data_type
    dtype = None if name is None else DTYPES[name]
    if dtype is None and settings.exact and settings.precision.low:
        dtype = settings.precision.dtype  # whatever DeepSpeed accumulates in, this is what it sends
    # DeepSpeed's stage 3 does not undo a division by the number of ranks before it reduces.
    shrinks = settings.exact and config.zero_optimization.stage == 3
    shrinks = shrinks and config.gradient_predivide_factor == size
    ranks = Ranks(
        comm,
        ShardedComm(comm),
        config.zero_optimization.stage,
        dtype,
        None if predivide == 1.0 else predivide,
        config.zero_optimization.overlap_comm is not False,
        predivide if shrinks and not config.prescale_gradients else None,
        safe_classes(config),
        settings.precision.autocast,
    )
    return replace(
        shared(settings, comm),
        ranks=ranks,
        record=settings.record if ranks.is_first else None,
    )


def _refuse_partial_norms(comm: Communicator, config: Config) -> None:
    size, world = len(comm.topology.ranks), dist.get_world_size()
    clipping = config.gradient_clipping
    if size < world and clipping and "gradient_clipping" not in config.model_fields_set:
        raise ConfigError(
            f"the communicator connects {size} of {world} ranks, and gradient_clipping is not "
            f"given, so its default of {clipping} holds; the norm would be that of the gradients "
            "on these ranks alone, but that of DTensors is of the whole. If the others hold other "
            "parts of the model that you have split by hand, set gradient_clipping to 0; if these "
            "are DTensors, set it as you like; if they train models of their own, set it to what "
            "each of them clips to"
        )
