"""The process groups behind a communicator, and nothing else that touches `torch.distributed` state.

A communicator sends from its own thread while the caller may use the default group, so it never
sends through a group that somebody else uses: it makes one gloo group of its own, over which CPU
chunks and all control messages go, told apart by tags. On an accelerator it adds groups of that
device's backend for shards and for copies.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from patrickstar.comm.errors import CommError, CommValueError
from patrickstar.comm.presence import Store
from patrickstar.comm.topology import Topology


@dataclass(frozen=True)
class Groups:
    """Process groups made for one communicator.

    Attributes:
        gloo: over all its ranks.
        shard: of the device's backend over the ranks of this rank's copy; None where chunks go over
            `gloo` point to point.
        across: likewise over the ranks with the same shard; None also with one copy.
        store: where its ranks meet, with a prefix of its own.
    """

    gloo: dist.ProcessGroup
    shard: dist.ProcessGroup | None
    across: dist.ProcessGroup | None
    store: Store

    def destroy(self) -> None:
        """Free the groups."""
        for group in (self.gloo, self.shard, self.across):
            if group is not None:
                dist.destroy_process_group(group)


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


def make_groups(topology: Topology, device: torch.device, timeout: float, native: bool) -> Groups:
    """Make the groups of a communicator; called on all ranks of `topology` in the same order.

    Raises:
        CommError: a rank did not come.
        CommValueError: a backend's own collectives cannot serve this order of ranks.
    """
    rank = dist.get_rank()
    limit = datetime.timedelta(seconds=timeout)
    try:
        gloo = _group(topology.ranks, "gloo", limit)
        shard = across = None
        if native:
            backend = dist.get_default_backend_for_device(device)
            shard = _group(topology.shard_ranks(rank), backend, limit)
            if topology.replicas > 1:
                across = _group(topology.replica_ranks(rank), backend, limit)
    except CommValueError:
        raise
    except RuntimeError as error:
        raise CommError(
            f"the process groups of ranks {topology.ranks} could not be made within {timeout} s; "
            f"every one of them must open the communicator: {error}"
        ) from error
    return Groups(gloo, shard, across, _store(gloo))


def _group(ranks: Sequence[int], backend: str, limit: datetime.timedelta) -> dist.ProcessGroup:
    if list(ranks) != sorted(ranks) and backend != "gloo":
        raise CommValueError(
            f"torch.distributed numbers a group's ranks in rising order, so {backend} cannot "
            f"shard over {tuple(ranks)}; list ranks in rising order"
        )
    # Only the members meet: other ranks may have no communicator at all, or another one.
    group = dist.new_group(
        list(ranks), timeout=limit, backend=backend, use_local_synchronization=True
    )
    assert isinstance(group, dist.ProcessGroup), "this rank is not in its own group"
    return group


def _store(group: dist.ProcessGroup) -> Store:
    # The default store is the only place that all launchers and backends offer, and torch has no
    # public name for it. A clone has a connection of its own, so that a thread blocked in one
    # does not keep the other from giving signs of life.
    store = c10d._get_default_store()
    clone = getattr(store, "clone", None)
    if clone is not None:
        with contextlib.suppress(RuntimeError):  # not every kind of store can be cloned
            store = clone()
    return c10d.PrefixStore(f"patrickstar/comm/{group.group_name}", store)
