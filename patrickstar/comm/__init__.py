"""The chunk communication library: collectives on flat buffers, usable without the rest.

See `docs/comm.md` for a tour. What a user needs:

- `Communicator`: one per rank, made with `open` or `from_mesh`;
- `ShardedComm`, `OwnerComm`: the two ways to spread chunks over ranks, behind `ChunkComm`;
- `OrderedIssuer`: the same order of collectives on every rank;
- `Communicator.reductions`: scalars over ranks;
- `CommError`: what any of it raises;
- `get_rank`, `all_reduce` and the like, from `torch_names`: `torch.distributed` for scripts.
"""

from patrickstar.comm.chunk_comm import ChunkComm
from patrickstar.comm.coalesced import Part
from patrickstar.comm.communicator import Communicator
from patrickstar.comm.counters import CollectiveTotals, CommCounters, CommObserver, ring_bytes
from patrickstar.comm.errors import CommError, CommValueError
from patrickstar.comm.issuer import FlushReport, OrderedIssuer, Ticket
from patrickstar.comm.layout import Layout, OwnedLayout, ShardLayout, assign_owners
from patrickstar.comm.order import Collective, Slot, merge_orders
from patrickstar.comm.owner import OwnerComm
from patrickstar.comm.sharded import ShardedComm
from patrickstar.comm.topology import Topology
from patrickstar.comm.torch_names import (
    ReduceOp,
    all_gather,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    get_global_rank,
    get_local_rank,
    get_rank,
    get_world_group,
    get_world_size,
    is_available,
    is_initialized,
    new_group,
    reduce,
)
from patrickstar.comm.work import AllOf, Work

__all__ = [
    "AllOf",
    "ChunkComm",
    "Collective",
    "CollectiveTotals",
    "CommCounters",
    "CommError",
    "CommObserver",
    "CommValueError",
    "Communicator",
    "FlushReport",
    "Layout",
    "OrderedIssuer",
    "OwnedLayout",
    "OwnerComm",
    "Part",
    "ReduceOp",
    "ShardLayout",
    "ShardedComm",
    "Slot",
    "Ticket",
    "Topology",
    "Work",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "assign_owners",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "is_available",
    "is_initialized",
    "merge_orders",
    "new_group",
    "reduce",
    "ring_bytes",
]
