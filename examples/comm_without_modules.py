"""Sharded training without `nn.Module`: chunks, collectives and nothing else.

    torchrun --nproc-per-node 2 examples/comm_without_modules.py
    torchrun --nproc-per-node 4 examples/comm_without_modules.py --shard-size 2
    torchrun --nproc-per-node 2 examples/comm_without_modules.py --owners

Every rank holds an N-th of the weights of a two-layer network, in two flat chunks. A step gathers a
chunk when it is needed, drops it after use, reduces its gradient to shards as soon as it is there,
and updates the own shard: ZeRO-3 by hand. While one chunk is used the next one travels, in an order
that is the same on every rank.

With --owners each chunk is whole on one rank, which broadcasts it and takes its gradients, one
chunk at a time: less scratch memory, and the same numbers.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from patrickstar.comm import (
    ChunkComm,
    Collective,
    Communicator,
    OrderedIssuer,
    OwnerComm,
    ShardedComm,
    Slot,
    Ticket,
    Work,
    assign_owners,
)

FEATURES, HIDDEN, BATCH = 16, 64, 32
SHAPES = {"first": (HIDDEN, FEATURES), "second": (1, HIDDEN)}
NUMELS = {name: rows * columns for name, (rows, columns) in SHAPES.items()}
GATHER, REDUCE = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
ORDER = [(GATHER, "first"), (GATHER, "second"), (REDUCE, "second"), (REDUCE, "first")]


class Network:
    """Two chunks of weights, of which this rank holds its parts."""

    def __init__(self, comm: Communicator, *, owners: bool = False) -> None:
        self.comm = comm
        self.chunks: ChunkComm = ShardedComm(comm)
        if owners:
            self.chunks = OwnerComm(comm, assign_owners(NUMELS, comm.shard.size))
        self.issuer = OrderedIssuer(comm.control, self.absent)
        torch.manual_seed(0)
        self.shards = {}
        for name, numel in NUMELS.items():
            start, stop = self.chunks.layout(name, numel).range(comm.shard.rank)
            self.shards[name] = (torch.randn(numel) * 0.2)[start:stop].clone()

    def gather(self, name: str) -> tuple[Ticket, torch.Tensor]:
        """Ask for a whole chunk: a handle to wait for, and the weights it will fill."""
        full = torch.empty(NUMELS[name])
        ticket = self.issuer.request(
            GATHER, name, lambda: self.chunks.all_gather(name, full, self.shards[name])
        )
        return ticket, full.view(SHAPES[name])

    def reduce(self, name: str, grad: torch.Tensor) -> tuple[Ticket, torch.Tensor]:
        """Average a gradient over ranks: a handle, and the shard of the mean it will fill."""
        own = torch.empty_like(self.shards[name])
        ticket = self.issuer.request(
            REDUCE, name, lambda: self.chunks.reduce_scatter(name, grad.flatten(), own, op="avg")
        )
        return ticket, own

    def absent(self, slot: Slot) -> Work:
        """Take part in a collective that this rank has no use for (here that never happens)."""
        full = torch.zeros(NUMELS[slot.chunk])
        if slot.collective is GATHER:
            return self.chunks.all_gather(slot.chunk, full, self.shards[slot.chunk])
        return self.chunks.reduce_scatter(slot.chunk, full)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor, lr: float) -> float:
        """One forward, backward and update; returns the mean loss over ranks."""
        self.issuer.begin([Slot(*place) for place in ORDER])
        # Both are asked for at once: the second travels while the first is used.
        first_there, first = self.gather("first")
        second_there, second = self.gather("second")
        first_there.wait()
        hidden = torch.tanh(inputs @ first.T)
        second_there.wait()
        error = (hidden @ second.T).squeeze(1) - targets
        # The first gradient is reduced while the second is computed.
        reduced = {"second": self.reduce("second", error @ hidden * (2 / len(inputs)))}
        outer = (error[:, None] * second) * (1 - hidden.square())
        reduced["first"] = self.reduce("first", outer.T @ inputs * (2 / len(inputs)))
        self.issuer.flush()
        for name, (there, mean) in reduced.items():
            there.wait()
            self.shards[name].sub_(mean, alpha=lr)
        (total,) = self.comm.reductions.sum([float(error.square().mean())])
        return total / len(self.comm.topology.ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sharded training without nn.Module.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--shard-size", type=int, help="shard within groups of this many ranks")
    parser.add_argument("--owners", action="store_true", help="a chunk is whole on one rank")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    with Communicator.open(shard_size=arguments.shard_size, device="cpu", timeout=60) as comm:
        network = Network(comm, owners=arguments.owners)
        teacher = torch.randn(FEATURES)
        batches = torch.Generator().manual_seed(comm.rank)  # every rank has batches of its own
        for step in range(arguments.steps):
            inputs = torch.randn(BATCH, FEATURES, generator=batches)
            loss = network.step(inputs, torch.tanh(inputs @ teacher), lr=0.1)
            if comm.rank == 0 and (step % 20 == 0 or step == arguments.steps - 1):
                print(f"step {step:3d}  loss {loss:.4f}")
        if comm.rank == 0:
            held = sum(shard.numel() for shard in network.shards.values())
            print(f"this rank holds {held} of {sum(NUMELS.values())} weights")
            for name, totals in comm.counters.snapshot().items():
                print(f"{name}: {totals.calls} calls, {totals.sent_bytes} bytes sent")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
