"""What all chunk collectives of a rank share: its place among ranks, one lane, one fate.

A `Communicator` is made once, on all ranks of its topology, and used as a context manager:

    with Communicator.open(timeout=60) as comm:
        chunks = ShardedComm(comm)
        chunks.all_gather("c0", full, shard).wait()

It owns the process groups, the lane that runs collectives in order, the counters, the watch over
the other ranks, and the *one error*: as soon as a collective has failed anywhere, every wait on
every rank ends with an error that names who is to blame, and nothing further starts. What failed
cannot be repaired inside the process: restart from a checkpoint (`torchrun --max-restarts`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from patrickstar.comm.call import Kind, Place, Turn
from patrickstar.comm.control import Control
from patrickstar.comm.counters import CommCounters
from patrickstar.comm.direct import SEGMENT_NUMEL, DirectTransport
from patrickstar.comm.errors import CommError, CommValueError
from patrickstar.comm.fate import Fate
from patrickstar.comm.groups import (
    BackendGroups,
    default_device,
    make_backend_groups,
    meet,
    mesh_groups,
    mesh_topology,
    require_initialized,
    store_host,
)
from patrickstar.comm.lane import Job
from patrickstar.comm.messages import Messages
from patrickstar.comm.native import NativeTransport
from patrickstar.comm.order import Collective
from patrickstar.comm.presence import Presence, Store
from patrickstar.comm.progress import Progress
from patrickstar.comm.reductions import GlobalReductions
from patrickstar.comm.stream_lane import StreamLane
from patrickstar.comm.streams import AcceleratorStreams
from patrickstar.comm.thread_lane import ThreadLane
from patrickstar.comm.topology import Topology
from patrickstar.comm.transport import Allocate, Transport, allocate_empty
from patrickstar.comm.work import Work

DEFAULT_TIMEOUT = 600.0
"""Seconds. Long enough for a rank that writes a checkpoint or compiles while others wait."""


class Communicator:
    """The communication of one rank. Made with `open` or `from_mesh`.

    Attributes:
        topology: who shards and replicates with whom.
        rank: this global rank.
        device: where the buffers of collectives live.
        shard: the transport among the ranks of this rank's copy.
        across: the transport among the ranks with the same shard, or None with one copy.
        counters: bytes and seconds so far.
        control: exchanges of small tensors over all ranks.
        reductions: scalars over all ranks.
        shard_reductions: scalars over the ranks of this rank's copy (norms of sharded state).
        allocate: where staging buffers come from.
        timeout: seconds that one collective may take.
    """

    def __init__(
        self,
        topology: Topology,
        messages: Messages,
        store: Store,
        backend: BackendGroups | None,
        *,
        device: torch.device,
        timeout: float,
        allocate: Allocate,
        segment_numel: int,
    ) -> None:
        self.topology = topology
        self.rank = dist.get_rank()
        self.device = device
        self.timeout = timeout
        self.allocate = allocate
        self.counters = CommCounters()
        self._messages = messages
        self._fate = fate = Fate(self.rank, messages)
        self._place = Place(Kind.DATA)
        self._submitting = threading.Lock()
        self._progress = progress = Progress()
        if device.type == "cpu":
            fate.lane = ThreadLane(timeout, progress, self.counters, fate.explain)
        else:
            streams = AcceleratorStreams(device)
            fate.lane = StreamLane(streams, timeout, progress, self.counters, fate.explain)
        beat = min(max(timeout / 20, 0.25), 1.0)
        fate.presence = Presence(
            store,
            self.rank,
            topology.ranks,
            progress,
            beat,
            fate.cannot_finish,
            fate.lane.poll,
            store_host(),
        )
        place = Place(Kind.CONTROL)
        self.control = self._control(topology.ranks, place)
        self.reductions = GlobalReductions(self.control)
        shard_ranks = topology.shard_ranks(self.rank)
        self.shard_reductions = GlobalReductions(self._control(shard_ranks, place))

        self.shard = self._transport(shard_ranks, backend.shard if backend else None, segment_numel)
        self.across: Transport | None = None
        if topology.replicas > 1:
            replicas = topology.replica_ranks(self.rank)
            self.across = self._transport(
                replicas, backend.across if backend else None, segment_numel
            )
        # Ends the threads at exit when a user forgot to, or could not.
        self._finalizer = weakref.finalize(self, fate.end)

    @classmethod
    def open(
        cls,
        topology: Topology | None = None,
        *,
        shard_size: int | None = None,
        device: torch.device | str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        allocate: Allocate = allocate_empty,
        segment_numel: int = SEGMENT_NUMEL,
        native: bool | None = None,
    ) -> Communicator:
        """Make a communicator; called on all its ranks, in the same order as other groups.

        Args:
            topology: the grid of ranks; default: all ranks of the job.
            shard_size: shorthand for a topology of all ranks, cut into sharding groups of this
                many consecutive ranks and replicated across them.
            device: where buffers live; default: the accelerator if the default process group has
                a backend for it, else the CPU.
            timeout: seconds that one collective, agreement or drain may take.
            allocate: where staging buffers come from.
            segment_numel: elements that a CPU reduction works on at a time; see `direct.py` for
                the memory that this bounds.
            native: use the backend's own collectives; default: on accelerators only. On a CPU they
                need more memory and do not promise the same bits for different shardings.

        Raises:
            CommError: no process group, or a rank did not come.
            CommValueError: ranks cannot be cut as told, or this rank is not among them.
        """
        require_initialized()
        if topology is None:
            topology = Topology.from_sizes(range(dist.get_world_size()), shard_size)
        elif shard_size is not None:
            raise CommValueError("give a topology or a shard_size, not both")
        where = default_device() if device is None else torch.device(device)
        native = where.type != "cpu" if native is None else native
        if where.type != "cpu" and not native:
            raise CommValueError(f"{where} needs native=True; point-to-point is for CPUs")
        _check(topology, timeout, segment_numel)
        backend = make_backend_groups(topology, where, timeout) if native else None
        return cls._connected(topology, backend, where, timeout, allocate, segment_numel)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        shard: str | None = None,
        replicate: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        allocate: Allocate = allocate_empty,
        segment_numel: int = SEGMENT_NUMEL,
    ) -> Communicator:
        """Make a communicator over one or two dimensions of a `DeviceMesh`.

        Other dimensions (tensor or expert parallelism) are left alone. On an accelerator the mesh's
        own process groups are used, with their timeout. See `groups.mesh_topology` for the names,
        and `open` for the rest.
        """
        require_initialized()
        topology = mesh_topology(mesh, shard, replicate)
        _check(topology, timeout, segment_numel)
        where = torch.device("cpu") if mesh.device_type == "cpu" else default_device()
        backend = None if where.type == "cpu" else mesh_groups(mesh, shard, replicate)
        return cls._connected(topology, backend, where, timeout, allocate, segment_numel)

    @classmethod
    def _connected(
        cls,
        topology: Topology,
        backend: BackendGroups | None,
        device: torch.device,
        timeout: float,
        allocate: Allocate,
        segment_numel: int,
    ) -> Communicator:
        messages, store = meet(topology.ranks, dist.get_rank(), timeout)
        comm = cls(
            topology,
            messages,
            store,
            backend,
            device=device,
            timeout=timeout,
            allocate=allocate,
            segment_numel=segment_numel,
        )
        comm.barrier()
        return comm

    def submit(
        self,
        collective: Collective,
        chunk: str,
        job: Job,
        buffers: Sequence[torch.Tensor],
        *,
        numel: int,
        wire: torch.dtype,
        wire_bytes: int,
        detail: str = "",
    ) -> Work:
        """Queue a collective. For implementations of `ChunkComm`; users call those.

        Args:
            collective: what it counts and reports as.
            chunk: the chunk's name.
            job: its blocking part.
            buffers: what it reads and writes.
            numel: elements of the full buffer, the same on every rank.
            wire: the dtype that travels.
            wire_bytes: bytes a rank sends in the ring model.
            detail: what else ranks must agree on; a rank with another one is found out.

        Raises:
            CommError: the communicator has failed or is closed.
        """
        for buffer in buffers:
            if buffer.device.type != self.device.type:
                raise CommValueError(
                    f"{collective} of chunk {chunk!r}: a buffer is on {buffer.device}, this "
                    f"communicator works on {self.device}",
                    collective=collective,
                    chunk=chunk,
                )
        payload = numel * wire.itemsize

        def counted(turn: Turn) -> None:
            job(turn)
            self.counters.add(collective, calls=1, payload_bytes=payload, wire_bytes=wire_bytes)

        # Numbering and queueing are one step: a call's place must be its turn.
        with self._submitting:
            name = str(wire).removeprefix("torch.")
            call = self._place.next(collective, chunk, numel, name, detail)
            return self._fate.lane.submit(call, counted, buffers)

    def barrier(self) -> None:
        """Wait until every rank has called this.

        Raises:
            CommError: a rank did not come within the timeout.
        """
        self.control.exchange("barrier", torch.zeros(1, dtype=torch.uint8))

    def drain(self) -> None:
        """Wait until everything submitted has finished.

        Raises:
            CommError: a collective failed, or the timeout passed.
        """
        drained = self._fate.lane.drain(self.timeout)
        self._fate.check()
        if not drained:
            raise CommError(f"collectives are still running after {self.timeout} s")

    def stumbled(self, raised: BaseException) -> None:
        """Tell the others of an exception, after which this rank may or may not go on.

        Whoever waits for this rank learns of it, unless it has `resumed` or started a collective
        within a few beats.
        """
        self._fate.stumbled(raised)

    def resumed(self) -> None:
        """This rank goes on after all; cheap where nothing was wrong."""
        self._fate.presence.resumed()

    def close(self) -> None:
        """Finish what was submitted, tell the other ranks, and end the threads and groups.

        Raises:
            CommError: what was submitted could not be finished.
        """
        if not self._finalizer.alive:
            return
        try:
            if self._fate.error is None:
                self.drain()
        finally:
            self._finalizer()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if raised is not None:
            # The caller will take part in nothing further; tell the others instead of draining.
            self._fate.give_up(raised)
        self.close()

    def _control(self, ranks: Sequence[int], place: Place) -> Control:
        return Control(
            self._messages,
            ranks,
            self.rank,
            place,
            self.timeout,
            self._progress,
            self._fate.explain,
        )

    def _transport(
        self, ranks: Sequence[int], group: dist.ProcessGroup | None, segment_numel: int
    ) -> Transport:
        if group is not None:
            return NativeTransport(group, self.allocate, host_waits=self.device.type == "cpu")
        return DirectTransport(self._messages, ranks, self.rank, self.allocate, segment_numel)


def _check(topology: Topology, timeout: float, segment_numel: int) -> None:
    topology.shard_ranks(dist.get_rank())  # refuses a rank outside
    if timeout <= 0 or segment_numel < 1:
        raise CommValueError(
            f"timeout={timeout} and segment_numel={segment_numel} must be positive"
        )
