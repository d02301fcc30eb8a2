"""Where a communicator's ranks meet: connections, a store, and process groups of the backend.

CPU chunks and all control messages go over connections of the communicator's own (`messages.py`).
An accelerator's chunks go over process groups of its backend, issued from the caller's thread in
the caller's order, so those may be shared: a `DeviceMesh` brings its own.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from patrickstar.comm.errors import CommError, CommValueError
from patrickstar.comm.messages import Messages, connect
from patrickstar.comm.presence import Store
from patrickstar.comm.topology import Topology


@dataclass(frozen=True)
class BackendGroups:
    """Process groups of an accelerator's backend.

    Attributes:
        shard: over the ranks of this rank's copy, in their order.
        across: over the ranks with the same shard; None with one copy.
    """

    shard: dist.ProcessGroup
    across: dist.ProcessGroup | None


def require_initialized() -> None:
    """Raise unless `torch.distributed` has a default group.

    Raises:
        CommError: it has none.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise CommError(
            "torch.distributed has no process group; launch with torchrun and call "
            "torch.distributed.init_process_group() first ('gloo' on CPUs, "
            "'cpu:gloo,cuda:nccl' on GPUs)"
        )


def default_device() -> torch.device:
    """Return the accelerator if the default process group has a backend for it, else the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        config = dist.get_backend_config()
        if f"{accelerator.type}:" in config:
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def mesh_topology(
    mesh: DeviceMesh, shard: str | None = None, replicate: str | None = None
) -> Topology:
    """Return the part of `mesh` that this rank shards and replicates within.

    Args:
        mesh: a mesh that may have further dimensions (tensor or expert parallelism); those are
            held at this rank's own coordinate.
        shard: the name of the dimension to shard over; may be left out for a mesh of one
            dimension, or of two, where it is the last (the convention of FSDP2's HSDP).
        replicate: the name of the dimension to replicate over; None replicates over nothing,
            except for a mesh of two dimensions without names given, where it is the first.

    Raises:
        CommValueError: the names are missing, unknown or the same.
    """
    names = mesh.mesh_dim_names or ()
    if shard is None and replicate is None and mesh.mesh.dim() in (1, 2):
        grid = mesh.mesh.reshape(-1, mesh.mesh.shape[-1])
        return Topology(tuple(tuple(row) for row in grid.tolist()))
    for name in (shard, replicate):
        if name is not None and name not in names:
            raise CommValueError(f"the mesh has no dimension {name!r}; it has {names}")
    if shard is None or shard == replicate:
        raise CommValueError(f"name the mesh dimension to shard over, one of {names}")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise CommValueError(f"rank {dist.get_rank()} is not in the mesh {mesh}")
    grid = mesh.mesh
    kept = [name for name in (replicate, shard) if name is not None]
    for place in reversed(range(grid.dim())):
        if names[place] not in kept:
            grid = grid.select(place, coordinate[place])
    left = [name for name in names if name in kept]
    grid = grid.permute(*(left.index(name) for name in kept))
    return Topology(tuple(tuple(row) for row in grid.reshape(-1, grid.shape[-1]).tolist()))


def mesh_groups(mesh: DeviceMesh, shard: str | None, replicate: str | None) -> BackendGroups:
    """Return the process groups that `mesh` has for the dimensions of `mesh_topology`."""
    if shard is None and replicate is None:
        across = mesh.get_group(0) if mesh.mesh.dim() == 2 else None
        return BackendGroups(mesh.get_group(mesh.mesh.dim() - 1), across)
    return BackendGroups(
        mesh.get_group(shard), None if replicate is None else mesh.get_group(replicate)
    )


def make_backend_groups(topology: Topology, device: torch.device, timeout: float) -> BackendGroups:
    """Make process groups of the backend for `device`; called on all ranks of the job.

    Raises:
        CommValueError: the topology leaves out ranks of the job (their part in making the groups
            would be missing), or is not in rising order.
    """
    if sorted(topology.ranks) != list(range(dist.get_world_size())):
        raise CommValueError(
            f"{topology.ranks} are not all ranks of the job; use Communicator.from_mesh, whose "
            "mesh has process groups already"
        )
    rank = dist.get_rank()
    columns = [topology.replica_ranks(first) for first in topology.rows[0]]
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in (*topology.rows, *columns) if topology.replicas > 1 else topology.rows:
        if list(ranks) != sorted(ranks):
            raise CommValueError(
                f"torch.distributed numbers a group's ranks in rising order, so it cannot shard "
                f"over {ranks}; list ranks in rising order"
            )
        group = dist.new_group(
            list(ranks),
            timeout=datetime.timedelta(seconds=timeout),
            backend=dist.get_default_backend_for_device(device),
        )
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            made[ranks] = group
    across = made[topology.replica_ranks(rank)] if topology.replicas > 1 else None
    return BackendGroups(made[topology.shard_ranks(rank)], across)


def meet(ranks: Sequence[int], rank: int, timeout: float) -> tuple[Messages, Store]:
    """Connect `ranks` and return their connections and a store of their own; called on all.

    Raises:
        CommError: a rank did not come.
    """
    try:
        store = _fresh_store(ranks, rank)
        limit = datetime.timedelta(seconds=timeout)
        connections = c10d.PrefixStore("connect", store)
        return connect(connections, ranks, rank, limit), c10d.PrefixStore("presence", store)
    except RuntimeError as error:
        raise CommError(
            f"ranks {tuple(ranks)} could not be connected within {timeout} s; every one of them "
            f"must open the communicator: {error}"
        ) from error


def store_host() -> int | None:
    """Return the global rank whose process hosts the default store, or None if no rank's does.

    Without torchrun, rank 0 hosts it; torchrun has its agent host it and says so.
    """
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


def _fresh_store(ranks: Sequence[int], rank: int) -> c10d.Store:
    # The default store is the only place that all launchers and backends offer, and torch has no
    # public name for it. A clone has a connection of its own, so that a thread blocked in one
    # does not keep the other from giving signs of life.
    store = c10d._get_default_store()
    clone = getattr(store, "clone", None)
    if clone is not None:
        with contextlib.suppress(RuntimeError):  # not every kind of store can be cloned
            store = clone()
    # Each rank counts how often it has met these ranks: the n-th meeting of one is that of all.
    members = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
    meeting = store.add(f"patrickstar/comm/{members}/{rank}", 1)
    return c10d.PrefixStore(f"patrickstar/comm/{members}/meeting-{meeting}", store)
