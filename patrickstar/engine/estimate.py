"""What a run will need and move, before it runs and without allocating the model.

The model is built on the meta device, laid out as the engine would, and rehearsed; the planner of
the live run then plays the trace under the budgets. So the answer is not a formula about
transformers but what this model does on inputs of these shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from patrickstar.engine.home import ChunkHome
from patrickstar.engine.initialize import RunSettings, parameter_groups
from patrickstar.engine.parameter import ManagedParameter
from patrickstar.engine.refusal import rehearsed_trace
from patrickstar.engine.state import ModelState, StateSpecification
from patrickstar.errors import ConfigError
from patrickstar.memory import ChunkManager, CpuTier, make_plan


@dataclass(frozen=True)
class TierEstimate:
    """Bytes of one tier: its budget, the smallest budget that works, and the peak under it.

    `smallest` and `peak` are None for the lowest tier, which takes what comes down; `held` is what
    it holds then.
    """

    budget: int | None
    smallest: int | None
    peak: int | None
    held: int | None = None


@dataclass(frozen=True)
class Estimate:
    """The answer.

    Attributes:
        fits: whether every budget holds.
        parameters: of the model.
        state_bytes: parameters, gradients, master weights and optimizer states.
        activation_bytes: the most that no chunk owns, at any moment.
        chunks, chunk_elements: how many groups of aligned chunks, and the longest.
        tiers: by name, fastest first.
        moved: bytes a step between neighbouring tiers, by "from->to".
        flops: multiplications and additions of forward and backward.
        updated_bytes: bytes that the update reads and writes.
    """

    fits: bool
    parameters: int
    state_bytes: int
    activation_bytes: int
    chunks: int
    chunk_elements: int
    tiers: dict[str, TierEstimate]
    moved: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    updated_bytes: int = 0


def estimate(
    provider: Callable[[], nn.Module],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    settings: RunSettings,
) -> Estimate:
    """What training the provider's model on `inputs` takes under the budgets of `settings`.

    Args:
        provider: builds the model; it is called with the meta device as the default.
        inputs: positional and keyword arguments of one forward; shapes and dtypes count.

    Raises:
        ConfigError: the model cannot be built or rehearsed without data.
    """
    with torch.device("meta"):
        module = provider()
    names = [
        *(["device"] if settings.device_budget is not None else []),
        "host",
        *(["disk"] if settings.disk is not None else []),
    ]
    budgets: dict[str, int | None] = {
        "device": settings.device_budget,
        "host": settings.host_budget,
        "disk": settings.disk[1] if settings.disk is not None else None,
    }
    # Tiers without budgets: nothing is ever put on them here.
    manager = ChunkManager([CpuTier(name, None) for name in names if name != "disk"])
    try:
        state = _lay_out(module, settings, manager)
        base = sum(buffer.nbytes for buffer in module.buffers())
        counter = FlopCounterMode(display=False)
        try:
            with counter:
                trace = rehearsed_trace(module, state, inputs, base)
        except Exception as error:
            raise ConfigError(
                "this model cannot be rehearsed without data, because what it does depends on the "
                f"values of its inputs, or on shapes other than those given ({error})"
            ) from error
    finally:
        manager.close()
    sizes = {chunk.id: chunk.nbytes for a in state.aligned for chunk in a.chunks()}
    state_bytes = sum(sizes.values())
    # A tier below all, so that the planner has somewhere to move to even when the run has not.
    memory = [name for name in names if name != "disk"]
    plan = make_plan(
        trace, sizes, [*(budgets[n] for n in memory), None], settings.policy, prefetch=False
    )
    free = make_plan(trace, sizes, [None] * (len(memory) + 1), settings.policy, prefetch=False)
    tiers: dict[str, TierEstimate] = {}
    moved: dict[str, int] = {}
    for index, name in enumerate(memory):
        smallest = plan.smallest[index]
        lowest = index + 1 == len(names)
        if lowest:  # nothing can leave it: it must hold everything at once
            smallest = max(free.peak[index], state_bytes)
        tiers[name] = TierEstimate(budgets[name], smallest, plan.peak.get(index))
        if not lowest:
            below = names[index + 1]
            moved[f"{name}->{below}"] = plan.saved.get(index, 0)
            moved[f"{below}->{name}"] = plan.loaded.get(index, 0)
    if "disk" in names:
        tiers["disk"] = TierEstimate(budgets["disk"], None, None, state_bytes)
    fits = all(
        t.budget is None or (t.smallest if t.smallest is not None else t.held or 0) <= t.budget
        for t in tiers.values()
    )
    trained = sum(a.parameter.numel for a in state.aligned if a.gradient is not None)
    states = len(settings.rule.states(settings.hyper))
    per_element = (
        state.specification.bytes_per_element(states)
        + 4 * states
        + (4 if state.specification.master else 0)
    )
    return Estimate(
        fits=fits,
        parameters=sum(p.numel() for p in module.parameters()),
        state_bytes=state_bytes,
        activation_bytes=trace.peak_other(0),
        chunks=len(state.aligned),
        chunk_elements=state.limit,
        tiers=tiers,
        moved=moved,
        flops=counter.get_total_flops(),
        updated_bytes=trained * per_element,
    )


def _lay_out(module: nn.Module, settings: RunSettings, manager: ChunkManager) -> ModelState:
    home = ChunkHome(manager)
    for parameter in module.parameters():
        # Laid out like the real ones, and never touched.
        parameter.__class__ = ManagedParameter
        parameter._home = home  # type: ignore[attr-defined]
    specification = StateSpecification(
        settings.precision.dtype,
        settings.grad_dtype,
        settings.precision.low,
        settings.round_masters,
        settings.chunk_limit,
        settings.host_budget,
    )
    groups = parameter_groups(module, settings, None)
    return ModelState(module, groups, settings.rule, specification, manager, home)


@dataclass(frozen=True)
class MachineFacts:
    """Rates of a machine, in operations and bytes a second."""

    gemm_flops: float
    copy_bytes_per_s: float
    disk_read: float
    disk_write: float

    @classmethod
    def of(cls, facts: dict[str, Any]) -> MachineFacts:
        """From the JSON that `python -m benchmarks.machine` writes."""
        try:
            disk = facts["disk"]
            return cls(
                float(facts["gemm_flops"]),
                float(facts["copy_bytes_per_s"]),
                float(disk["read"]),
                float(disk["write"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the machine file lacks {error}; it has 'gemm_flops', 'copy_bytes_per_s' and "
                "'disk' with 'read' and 'write', in operations and bytes a second"
            ) from error


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what takes them; `total` when all that can overlap does."""

    compute: float
    update: float
    transfer: float

    @property
    def total(self) -> float:
        return max(self.compute + self.update, self.transfer)

    @property
    def bottleneck(self) -> str:
        return "transfer" if self.transfer > self.compute + self.update else "compute"


def step_time(found: Estimate, machine: MachineFacts) -> StepTime:
    """The ideal step on `machine`: what its rates allow, nothing in between."""
    to_disk = sum(n for way, n in found.moved.items() if way.endswith("->disk"))
    from_disk = sum(n for way, n in found.moved.items() if way.startswith("disk->"))
    between = sum(found.moved.values()) - to_disk - from_disk
    return StepTime(
        compute=found.flops / machine.gemm_flops,
        update=found.updated_bytes / machine.copy_bytes_per_s,
        transfer=to_disk / machine.disk_write
        + from_disk / machine.disk_read
        + 2 * between / machine.copy_bytes_per_s,
    )
