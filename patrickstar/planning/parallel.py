"""A paper model of data parallel runs: what ranks exchange and hold, however many there are.

Volumes are those of the ZeRO paper (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", SC 2020, section 7), a rank's share in bytes, for P weights and N ranks:
an all-reduce of the gradients is a reduce-scatter and an all-gather of (N-1)/N P each, so stages 0,
1 and 2 move 2P; stage 3 gathers the weights for the forward and again for the backward and
scatters the gradients, 3P. Stage 1 shards the optimizer's states and master weights, stage 2 the
gradients too, stage 3 the weights too: each rank holds 1/N of what is sharded.

Time: inside a node each rank sends over its own link; across nodes the ranks of a node share the
node's, and each carries 1/(ranks of a node) of the data, since a hierarchical collective reduces
inside first. Every chunk costs the latency of a ring inside, n-1 messages for n members, and of a
tree across, log2(n). Stages 0 to 2 can hide the exchange of gradients behind the backward, stage
3 all of it behind both passes; what cannot be hidden adds to the step. All of this is the least
that it can take: no contention and no stragglers.

Whether budgets hold is said where it is sure. They do if a rank could keep everything whole, beside
its shards, and nothing ever left a tier. They do not if what a rank must hold at one moment is more
than there is. How much is gathered at once lies between, and shows when the ranks run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from patrickstar.engine.initialize import RunSettings
from patrickstar.engine.needs import with_margin
from patrickstar.errors import ConfigError
from patrickstar.machine import Machine
from patrickstar.planning.prediction import Prediction
from patrickstar.planning.rehearsed import Rehearsed

_BACKWARD = 2 / 3  # of the computation: two products for each of the forward's
_KINDS, _PAGE, _MOST_CHUNKS = 6, 4096, 64  # of chunks of one weight; bytes; of a model on ranks


@dataclass(frozen=True)
class Stage:
    """One way to shard, from the view of a rank.

    Attributes:
        stage: 0 replicates everything; 1, 2 and 3 are ZeRO's.
        volume_bytes: sent in a step, and received.
        inside_bytes, across_bytes: of it, within the node and to other nodes.
        parameter_bytes, gradient_bytes, optimizer_bytes: held between uses.
        state_bytes: their sum.
        communication_s: seconds of the links; None if the machine's are not known.
        step_s: seconds of a step with what cannot be hidden; None likewise.
        fits: whether the budgets hold; None where that is not known before the ranks run.
    """

    stage: int
    volume_bytes: int
    inside_bytes: int
    across_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    state_bytes: int
    communication_s: float | None
    step_s: float | None
    fits: bool | None


@dataclass(frozen=True)
class DataParallel:
    """All stages on `world_size` ranks, `ranks_per_node` to a node."""

    world_size: int
    ranks_per_node: int
    nodes: int
    stages: list[Stage]


def data_parallel(
    run: Rehearsed,
    settings: RunSettings,
    machine: Machine,
    found: Prediction,
    world_size: int,
) -> DataParallel:
    """What `run` takes on each of `world_size` ranks like `machine`.

    Args:
        found: the same on one rank; its step is what a rank computes.

    Raises:
        ConfigError: `world_size` is below 1.
    """
    if world_size < 1:
        raise ConfigError(f"the world size is {world_size}; it must be at least 1")
    network = machine.network
    per_node = min(world_size, 1 if network is None else network.ranks_per_node)
    nodes = -(-world_size // per_node)
    stages = []
    for number in range(4):
        held = _held(run, settings, number, world_size)
        inside, across = _volume(run, settings, number, per_node, nodes)
        seconds = None
        if network is not None:
            messages = run.chunks * (3 if number == 3 else 2)
            latency = messages * network.latency_s * (per_node - 1 + math.log2(nodes))
            links = inside / network.inside_bytes_per_s
            links += across * per_node / network.across_bytes_per_s
            seconds = links + latency
        stages.append(
            Stage(
                stage=number,
                volume_bytes=inside + across,
                inside_bytes=inside,
                across_bytes=across,
                parameter_bytes=held[0],
                gradient_bytes=held[1],
                optimizer_bytes=held[2],
                state_bytes=sum(held),
                communication_s=seconds,
                step_s=_step(found, seconds, number),
                fits=_fits(run, settings, sum(held)),
            )
        )
    return DataParallel(world_size, per_node, nodes, stages)


def _fits(run: Rehearsed, settings: RunSettings, held: int) -> bool | None:
    """Whether a rank that holds `held` bytes of state between uses keeps its budgets."""
    # Chunks are shorter than on one rank, and each is padded to its shards and to pages.
    padding = 2 * _KINDS * _PAGE * (sum(run.tensors.values()) + _MOST_CHUNKS)
    built = run.needs.built_in(run.budgets)
    enough = [
        with_margin(max(run.everything(tier), built[tier]) + held + padding)
        for tier in range(len(run.names))
    ]
    pairs = list(zip(run.budgets, enough, strict=True))
    if all(budget is None or budget >= most for budget, most in pairs):
        return True
    first, room = run.budgets[0], sum(budget or 0 for budget in run.budgets)
    lacks = settings.disk is None and None not in run.budgets and held > room
    return False if lacks or (first is not None and run.activation_bytes > first) else None


def _held(run: Rehearsed, settings: RunSettings, stage: int, ranks: int) -> tuple[int, int, int]:
    parameters = run.parameters * run.dtype.itemsize
    gradients = run.trained * settings.grad_dtype.itemsize
    wide = len(settings.rule.states(settings.hyper)) + int(settings.precision.low)
    optimizer = run.trained * 4 * wide
    return (
        -(-parameters // ranks) if stage >= 3 else parameters,
        -(-gradients // ranks) if stage >= 2 else gradients,
        -(-optimizer // ranks) if stage >= 1 else optimizer,
    )


def _volume(
    run: Rehearsed, settings: RunSettings, stage: int, per_node: int, nodes: int
) -> tuple[int, int]:
    """Bytes that a rank sends inside its node and across, in a step."""
    weights = run.parameters * run.dtype.itemsize
    gradients = run.trained * settings.grad_dtype.itemsize
    # Without sharded states gradients are gathered, with them the updated weights are.
    gathered = gradients if stage == 0 else 2 * weights if stage == 3 else weights
    moved = gathered + gradients
    inside = moved * (per_node - 1) / per_node
    across = moved / per_node * (nodes - 1) / nodes
    return round(inside), round(across)


def _step(found: Prediction, communication: float | None, stage: int) -> float | None:
    if found.step is None or communication is None:
        return None
    compute = found.step.compute
    # A third of stage 3's traffic belongs to the forward, two thirds to the backward; of the others
    # half goes with the backward, and the other half follows it.
    if stage == 3:
        hidden = min(communication / 3, compute * (1 - _BACKWARD))
        hidden += min(2 * communication / 3, compute * _BACKWARD)
    else:
        hidden = min(communication / 2, compute * _BACKWARD)
    return found.step.total + communication - hidden
