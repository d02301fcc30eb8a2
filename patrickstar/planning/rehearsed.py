"""A run rehearsed: its model built on the meta device, laid out as the engine would, traced.

Nothing here depends on what memory there is, but for one thing: the length of chunks is chosen by
the budget of the tier that updates run on (`memory.layout`), so another budget may mean another
layout and another trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patrickstar.engine.home import ChunkHome
from patrickstar.engine.initialize import (
    ParamGroups,
    RunSettings,
    parameter_groups,
    specification_of,
)
from patrickstar.engine.overlap import families
from patrickstar.engine.parameter import ManagedParameter
from patrickstar.engine.refusal import rehearsed_trace
from patrickstar.engine.state import ModelState
from patrickstar.errors import ConfigError, PatrickStarError
from patrickstar.memory import ChunkManager, CpuTier, Trace
from patrickstar.planning.work import Work

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Rehearsed:
    """What a run does.

    Attributes:
        names: of the tiers in memory, fastest first.
        parameters: weights of the model; `trained`, those that are updated.
        trace: of one iteration.
        sizes: bytes of every chunk.
        family: for each chunk that an update touches, the parameter chunk that it goes with.
        work: what is computed.
        base: bytes of buffers.
        dtype: of the weights.
        state_bytes: of all chunks.
        updates: bytes that the update of each parameter chunk reads and writes.
        smallest_update: bytes that the largest update holds at once.
        update_tier: where updates run.
        chunks, chunk_elements: how many groups of aligned chunks, and the longest.
    """

    names: tuple[str, ...]
    parameters: int
    trained: int
    trace: Trace
    sizes: dict[int, int]
    family: dict[int, int]
    work: Work
    base: int
    dtype: torch.dtype
    state_bytes: int
    updates: dict[int, int]
    smallest_update: int
    update_tier: int
    chunks: int
    chunk_elements: int

    @property
    def update_bytes(self) -> int:
        """What all updates read and write."""
        return sum(self.updates.values())

    @property
    def activation_bytes(self) -> int:
        """The most that no chunk owns, at any moment."""
        return self.trace.peak_other(0)


def rehearse_run(
    provider: Callable[[], nn.Module],
    inputs: Inputs,
    settings: RunSettings,
    param_groups: ParamGroups | None = None,
    known: Rehearsed | None = None,
) -> Rehearsed:
    """Build the provider's model without data and rehearse an iteration on `inputs`.

    Args:
        provider: is called with the meta device as the default.
        inputs: positional and keyword arguments of one forward; shapes and dtypes count.
        param_groups: as `initialize_engine` takes it.
        known: the same model on the same inputs under other budgets; it is the answer if these
            budgets give the same layout.

    Raises:
        ConfigError: the model cannot be built or rehearsed without data.
    """
    module = _built(provider)
    names = ("host",) if settings.device_budget is None else ("device", "host")
    # Tiers without budgets: nothing is ever put on them here.
    manager = ChunkManager([CpuTier(name, None) for name in names])
    work = Work()
    try:
        settings.precision.cast_buffers(module)
        base = sum(buffer.nbytes for buffer in module.buffers())
        state = _lay_out(module, settings, param_groups, manager)
        sizes = {chunk.id: chunk.nbytes for a in state.aligned for chunk in a.chunks()}
        layout = (names, sizes, state.update_tier)
        if known is not None and (known.names, known.sizes, known.update_tier) == layout:
            return known
        trace = _traced(module, state, inputs, base, work)
        return Rehearsed(
            names=names,
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            trained=sum(a.parameter.numel for a in state.aligned if a.gradient is not None),
            trace=trace,
            sizes=sizes,
            family=families(state.aligned),
            work=work,
            base=base,
            dtype=state.specification.dtype,
            state_bytes=state.total_bytes(),
            updates=_update_bytes(state),
            smallest_update=state.smallest_update(),
            update_tier=state.update_tier,
            chunks=len(state.aligned),
            chunk_elements=state.limit,
        )
    finally:
        manager.close()


def _update_bytes(state: ModelState) -> dict[int, int]:
    found: dict[int, int] = {}
    for aligned in state.aligned:
        if aligned.gradient is None:
            continue
        wide = sum(c.nbytes for c in aligned.states.values())
        master = 0 if aligned.master is None else aligned.master.nbytes
        weight = aligned.parameter.nbytes * (1 if aligned.master is not None else 2)
        found[aligned.parameter.id] = aligned.gradient.nbytes + weight + 2 * (wide + master)
    return found


def _built(provider: Callable[[], nn.Module]) -> nn.Module:
    try:
        with torch.device("meta"):
            module: Any = provider()
    except PatrickStarError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model cannot be built without data ({type(error).__name__}: {error}); its "
            "constructor must not look at the values of tensors"
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"the model provider returned a {type(module).__name__}; it must return an nn.Module"
        )
    return module


def _lay_out(
    module: nn.Module,
    settings: RunSettings,
    param_groups: ParamGroups | None,
    manager: ChunkManager,
) -> ModelState:
    home = ChunkHome(manager)
    for parameter in module.parameters():
        # Laid out like the real ones, and never touched.
        parameter.__class__ = ManagedParameter
        parameter._home = home  # type: ignore[attr-defined]
    specification = specification_of(settings, manager.tiers[0].name, settings.device_budget)
    groups = parameter_groups(module, settings, param_groups)
    return ModelState(module, groups, settings.rule, specification, manager, home)


def _traced(module: nn.Module, state: ModelState, inputs: Inputs, base: int, work: Work) -> Trace:
    try:
        return rehearsed_trace(module, state, inputs, base, work)
    except Exception as error:
        raise ConfigError(
            "this model cannot be rehearsed without data, because what it does depends on the "
            f"values of its inputs, or on shapes other than those given ({error})"
        ) from error
