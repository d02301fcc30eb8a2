"""A store that only the ranks of this attempt know.

Ranks find each other in a store that their launcher hosts. `torchrun` keeps it through restarts, so
a rank that comes back finds there the addresses of processes that are dead, and is refused or waits
for them (https://github.com/pytorch/pytorch/issues/135712). The number of restarts in the
environment does not help: each machine counts its own.

So the ranks agree on a name that no attempt before had, and use the store under it. The first rank
draws the name. Another one may read an old name at first, with old answers under it; it signs what
it writes with a number of its own, and believes the name where the first rank has echoed that.
"""

from __future__ import annotations

import datetime
import time
import uuid

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from patrickstar.comm import CommError

_NAME = "patrickstar/attempt"
_PAUSE = 0.01  # seconds between two looks at the store


def join_group(backend: str, timeout: datetime.timedelta | None = None) -> None:
    """Make the default process group of the ranks that the environment tells of.

    Args:
        timeout: until a rank that does not come is an error, and of a collective; None for torch's.

    Raises:
        CommError: a rank did not come.
    """
    limit = dist.default_pg_timeout if timeout is None else timeout
    store, rank, size = next(rendezvous("env://", timeout=limit))
    dist.init_process_group(
        backend,
        store=fresh(store, rank, size, limit.total_seconds()),
        rank=rank,
        world_size=size,
        timeout=limit,
    )


def fresh(store: Store, rank: int, size: int, timeout: float) -> Store:
    """`store` as if nobody had used it before; called on all `size` ranks.

    Raises:
        CommError: a rank did not come within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    if rank > 0:
        return PrefixStore(f"{_follow(store, rank, deadline)}/store", store)
    name = f"{_NAME}-{uuid.uuid4().hex}"
    store.set(_NAME, name)
    for other in range(1, size):
        key = f"{name}/rank-{other}"
        _await(store, key, deadline, f"rank {other} did not come")
        store.set(f"{key}/seen", store.get(key).decode())
    return PrefixStore(f"{name}/store", store)


def _follow(store: Store, rank: int, deadline: float) -> str:
    """The name that the first rank has drawn for this attempt."""
    mine = uuid.uuid4().hex
    signed = ""
    while True:
        _await(store, _NAME, deadline, "rank 0 did not come")
        name: str = store.get(_NAME).decode()
        key = f"{name}/rank-{rank}"
        if name != signed:
            store.set(key, mine)
            signed = name
        if store.check([f"{key}/seen"]) and store.get(f"{key}/seen").decode() == mine:
            return name
        _pause(deadline, "rank 0 did not come")


def _await(store: Store, key: str, deadline: float, otherwise: str) -> None:
    while not store.check([key]):
        _pause(deadline, otherwise)


def _pause(deadline: float, otherwise: str) -> None:
    if time.monotonic() > deadline:
        raise CommError(
            f"{otherwise}: the ranks that were launched could not be connected in time. See "
            "whether its process runs, and whether MASTER_ADDR and MASTER_PORT can be reached "
            "from there"
        )
    time.sleep(_PAUSE)
