"""What the ranks of one host have together: its memory and its disk, in equal shares.

`memory.host` and `memory.disk.size` are promises about a machine, so all ranks on it count, also
those that the communicator does not connect: with tensor parallelism it connects the ranks that
hold the same part, and those with the other parts need as much. The launcher tells how many it has
started here.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import torch.distributed as dist

from patrickstar.comm import Communicator
from patrickstar.engine.initialize import RunSettings


def shared(settings: RunSettings, comm: Communicator) -> RunSettings:
    """`settings` with this rank's share of its host's budgets; all ranks of `comm` call it.

    Raises:
        CommError: a rank did not come.
    """
    here, host, disk = ranks_of_this_host(comm), settings.host_budget, settings.disk
    if disk is not None and disk[1] is not None:
        disk = (disk[0], disk[1] // here)
    return replace(settings, host_budget=None if host is None else host // here, disk=disk)


def ranks_of_this_host(comm: Communicator) -> int:
    """How many ranks of the run share this machine's memory and disk."""
    mine = socket.gethostname().encode()
    connected = comm.control.exchange_bytes("names of hosts", mine).count(mine)
    if len(comm.topology.ranks) == dist.get_world_size():
        return connected
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(connected, min(int(told), dist.get_world_size()) if told.isdecimal() else 0)
