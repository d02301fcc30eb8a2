"""A run rehearsed: its model built on the meta device, laid out as the engine would, traced.

Nothing here depends on what memory there is, but for one thing: the length of chunks is chosen by
the budget of the tier that updates run on (`memory.layout`). So the model is rehearsed once, and
seen through the layout of whatever budgets are asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from patrickstar.engine.grouping import with_gradients_once
from patrickstar.engine.initialize import (
    ParamGroups,
    RunSettings,
    parameter_groups,
)
from patrickstar.engine.needs import Budgets, Needs
from patrickstar.engine.on_paper import manage_on_paper, split_on_paper
from patrickstar.engine.overlap import families
from patrickstar.engine.refusal import rehearsed_alone
from patrickstar.engine.sizing import dtypes_of, memory_of, needs_of
from patrickstar.engine.state import ModelState
from patrickstar.errors import ConfigError, PatrickStarError
from patrickstar.memory import Trace
from patrickstar.planning.work import Work

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Rehearsed:
    """What a run does.

    Attributes:
        names: of the tiers in memory, fastest first.
        parameters: weights of the model; `trained`, those that are updated.
        needs: says which budgets work.
        budgets: that the layout is for.
        trace: of one iteration.
        work_moments: how many moments `work` has, the step included.
        places: for every moment of `work`, as often as there are backwards before a step, the one
            in `trace` that it is part of.
        sizes: bytes of every chunk.
        family: for each chunk that an update touches, the parameter chunk that it goes with.
        plain: the parameter chunks whose gradients come once each.
        work: what is computed.
        base: bytes of buffers.
        dtype: of the weights.
        state_bytes: of all chunks.
        updates: bytes that the update of each parameter chunk reads and writes.
        tensors: parameters in each of these chunks.
        update_tier: where updates run.
        chunks, chunk_elements: how many groups of aligned chunks, and the longest.
    """

    names: tuple[str, ...]
    parameters: int
    trained: int
    needs: Needs
    budgets: Budgets
    trace: Trace
    work_moments: int
    places: list[int]
    sizes: dict[int, int]
    family: dict[int, int]
    plain: frozenset[int]
    work: Work
    base: int
    dtype: torch.dtype
    state_bytes: int
    updates: dict[int, int]
    tensors: dict[int, int]
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

    def everything(self, tier: int) -> int:
        """The most that a tier in memory would hold if nothing ever left it."""
        unlimited = [None] * (len(self.names) + 1)
        return self.needs.planned(self.trace, self.sizes, unlimited).peak.get(tier, 0)

    def under(self, settings: RunSettings) -> Rehearsed:
        """The same model on the same inputs under other budgets."""
        _, budgets = memory_of(settings)
        return replace(self, budgets=budgets, **_seen_through(self.needs, budgets))


def rehearse_run(
    provider: Callable[[], nn.Module],
    inputs: Inputs,
    settings: RunSettings,
    param_groups: ParamGroups | None = None,
) -> Rehearsed:
    """Build the provider's model without data and rehearse an iteration on `inputs`.

    Args:
        provider: is called with the meta device as the default.
        inputs: positional and keyword arguments of one forward; shapes and dtypes count.
        param_groups: as `initialize_engine` takes it.

    Raises:
        ConfigError: the model cannot be built or rehearsed without data.
    """
    module = _built(provider)
    split_on_paper(module, settings.piece_size)
    dtypes = dtypes_of(module)
    settings.precision.cast_buffers(module)
    base = sum(buffer.nbytes for buffer in module.buffers())
    manage_on_paper(module)
    groups = parameter_groups(module, settings, param_groups)
    needs, work = needs_of(module, groups, settings, dtypes=dtypes, base=base), Work()
    names, budgets = memory_of(settings)
    try:
        alone = rehearsed_alone(module, needs.laid_out(budgets).state, inputs, base, work)
    except Exception as error:
        raise ConfigError(
            "this model cannot be rehearsed without data, because what it does depends on the "
            f"values of its inputs, or on shapes other than those given ({error})"
        ) from error
    needs.alone = alone
    laid = needs.laid_out(budgets)
    aligned = laid.state.aligned
    return Rehearsed(
        names=names,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        trained=sum(slot.numel for a in aligned if a.gradient is not None for slot in a.slots),
        needs=needs,
        budgets=budgets,
        work=work,
        work_moments=len(alone.moments),
        base=base,
        dtype=laid.state.specification.dtype,
        update_tier=laid.state.update_tier,
        **_seen_through(needs, budgets),
    )


def _seen_through(needs: Needs, budgets: Budgets) -> dict[str, Any]:
    """What of a `Rehearsed` follows from the layout for `budgets`."""
    laid = needs.laid_out(budgets)
    assert needs.alone is not None
    return {
        "trace": laid.trace,
        "places": laid.places,
        "sizes": laid.sizes,
        "family": families(laid.state.aligned),
        "plain": with_gradients_once(needs.alone, laid.state),
        "state_bytes": laid.state.total_bytes(),
        "updates": _update_bytes(laid.state),
        "tensors": {a.parameter.id: len(a.slots) for a in laid.state.aligned},
        "chunks": len(laid.state.aligned),
        "chunk_elements": laid.state.limit,
    }


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
            f"the model cannot be built without data ({type(error).__name__}: {error}); the "
            "provider is called without arguments, on the meta device, so what it builds must not "
            "look at the values of tensors"
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"the model provider returned a {type(module).__name__}; it must return an nn.Module"
        )
    return module
