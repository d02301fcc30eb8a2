"""Refusing a budget with the smallest one that works.

A budget that is too small shows at the first moment that does not fit. What the rest of the
iteration would need is found by rehearsing it, so that the user is told one number that works and
not a chain of numbers that get one moment further each.

The first iteration needs less than those that follow, which have the optimizer's states from their
beginning. Where nothing below memory takes what comes down, that is looked into before the first
update, so that no run is refused after it began to train.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from patrickstar.engine.grouping import gradient_alone, grouped, parameter_alone
from patrickstar.engine.needs import Needs, at_once, enough_below, enough_on_disk, with_margin
from patrickstar.engine.pieces import PiecedParameter
from patrickstar.engine.rehearsal import OperatorSink, RehearsedChunks, rehearse
from patrickstar.engine.state import ModelState
from patrickstar.engine.updating import update_uses
from patrickstar.errors import BudgetError
from patrickstar.memory import (
    Chunk,
    ChunkManager,
    DiskTier,
    Moment,
    Trace,
    format_budget,
    make_plan,
)
from patrickstar.memory.sizes import size_at_least


def shapes_of(inputs: Any) -> Any:
    """`inputs` with tensors that have shapes and dtypes only."""
    return tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device="meta"), inputs)


def rehearsed_alone(
    module: nn.Module,
    state: ModelState,
    inputs: Any,
    base: int,
    sink: OperatorSink | None = None,
) -> Trace:
    """The trace of an engine's model on inputs of these shapes, with every parameter by itself.

    Args:
        base: bytes that are always there and no chunk owns.
        sink: is told of every operator.
    """
    chunks: dict[str, list[RehearsedChunks]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parts = parameter.pieces if isinstance(parameter, PiecedParameter) else [parameter]
        if id(parts[0]) in state.slots:
            chunks[name] = [_alone(state, part) for part in parts]
    kinds = state.specification
    return rehearse(
        module,
        inputs,
        chunks,
        dtype=kinds.dtype,
        grad_dtype=kinds.grad_dtype,
        base=base,
        sink=sink,
        lookups=len([tier for tier in state.manager.tiers if not isinstance(tier, DiskTier)]) - 1,
    )


def _alone(state: ModelState, parameter: nn.Parameter) -> RehearsedChunks:
    aligned, slot = state.of(parameter)
    gradient = None if aligned.gradient is None else gradient_alone(slot.index)
    return RehearsedChunks(parameter_alone(slot.index), gradient)


def rehearsed_trace(module: nn.Module, state: ModelState, inputs: Any, base: int) -> Trace:
    """The trace of one iteration, as the run would write it."""
    return grouped(rehearsed_alone(module, state, inputs, base), state)[0]


def _excess(real: Trace | None, rehearsed: Trace) -> int:
    """By how many bytes the memory of real operators exceeded that of rehearsed ones so far."""
    most, seen = 0, (0, 0)
    for there, here in zip(real.moments if real else [], rehearsed.moments, strict=False):
        seen = max(seen[0], there.other.get(0, 0)), max(seen[1], here.other.get(0, 0))
        most = max(most, seen[0] - seen[1])
    return most


def with_smallest(
    error: BudgetError,
    module: nn.Module,
    state: ModelState,
    groups: Sequence[dict[str, Any]],
    inputs: Any,
    base: int,
    backwards: int,
) -> BudgetError:
    """`error`, naming the smallest budget for the whole iteration if it can be found out.

    Args:
        groups: the optimizer's.
        backwards: before every step.
    """
    try:
        alone = rehearsed_alone(module, state, inputs, base)
    except Exception:  # a path that depends on data: what is known is that this much is needed
        more = with_margin(error.smallest + error.smallest // 4)  # so that few tries are enough
        return BudgetError(
            f"the {error.tier} budget of {format_budget(error.budget)} is too small for this model "
            f"on these inputs. It takes at least {size_at_least(more)} ({more} bytes); what comes "
            "after this point depends on the data of this model and is not known",
            tier=error.tier,
            budget=error.budget,
            smallest=more,
        )
    manager = state.manager
    memory = [tier for tier in manager.tiers if not isinstance(tier, DiskTier)]
    names = [tier.name for tier in memory]
    needs = Needs(
        module,
        groups,
        state.rule,
        state.specification,
        names,
        manager.policy,
        disk=len(memory) < len(manager.tiers),
        alone=alone,
        backwards=backwards,
        dtypes=None,
        base=base,
    )
    budgets = tuple(tier.capacity for tier in memory)
    if error.tier not in names:
        laid = needs.laid_out(budgets)
        sizes, most_away = laid.sizes, 0
        if away := [chunk.nbytes for chunk in _chunks(manager) if chunk.kind == "activation"]:
            # What regions keep was rehearsed as if it stayed on the device.
            sizes, budgets = sizes | {-1: max(away)}, (*[0] * (len(budgets) - 1), budgets[-1])
            most_away = laid.trace.peak_other(0)
        smallest = with_margin(enough_on_disk(laid.trace, sizes, budgets, away=most_away))
        return _too_small(error.tier, error.budget, max(error.smallest, smallest))
    verdict = needs.judge(budgets)
    smallest = verdict.smallest[names.index(error.tier)]
    # Real kernels may keep more than the fake ones (packed weights, workspaces): by how much more
    # is seen where both have been.
    excess = 2 * _excess(manager.abandoned, grouped(alone, state)[0])
    if excess > with_margin(smallest) - smallest:  # more than the margin that it has
        smallest += excess
    if max(error.smallest, error.budget) >= smallest:  # real kernels take more than is known here
        smallest = with_margin(max(error.smallest, error.budget))
    return _too_small(error.tier, error.budget, smallest)


def refuse_what_would_not_repeat(state: ModelState, recorded: Trace | None) -> None:
    """Refuse a budget that the first iteration fits and the next would not.

    Args:
        recorded: the iteration so far, up to its updates; None if it is no first one.

    Raises:
        BudgetError: with the smallest that works.
    """
    manager = state.manager
    if recorded is None or state.ranks is not None:  # what a rank gathers is not known here
        return
    memory = [tier for tier in manager.tiers if not isinstance(tier, DiskTier)]
    disk, lowest = len(memory) < len(manager.tiers), len(memory) - 1
    budget = memory[lowest].capacity
    judged = budget is not None and not (disk and not lowest)
    room = manager.tiers[-1].capacity if disk else None
    if not judged and room is None:
        return
    moments = list(recorded.moments)
    other = {number: account.other for number, account in enumerate(manager.ledger.tiers)}
    for aligned in state.aligned:
        if aligned.gradient is not None and any(slot.has_grad for slot in aligned.slots):
            uses = update_uses(aligned, state.update_tier, remade=False)
            moments.append(Moment(uses, other, (aligned.gradient.id,)))
    trace = Trace(moments)
    sizes = _sizes(state, trace)
    if budget is not None and judged:
        need = _need(state, trace, sizes, lowest, disk=disk)
        if need > budget:
            raise _too_small(memory[lowest].name, budget, need)
    if room is not None and room < sum(sizes.values()):
        need = enough_on_disk(trace, sizes, [tier.capacity for tier in memory])
        if need > room:
            raise _too_small(manager.tiers[-1].name, room, need)


def _chunks(manager: ChunkManager) -> Iterator[Chunk]:
    return (manager.chunk(id_) for id_ in manager.ledger.chunks())


def _sizes(state: ModelState, trace: Trace) -> dict[int, int]:
    """Bytes of every chunk of the state and of the trace."""
    sizes = {chunk.id: chunk.nbytes for aligned in state.aligned for chunk in aligned.chunks()}
    there = {use.chunk for moment in trace.moments for use in moment.uses}
    there.update(c for moment in trace.moments for held in moment.held.values() for c in held)
    return sizes | {id_: state.manager.chunk(id_).nbytes for id_ in there - sizes.keys()}


def _need(
    state: ModelState, trace: Trace, sizes: Mapping[int, int], tier: int, *, disk: bool
) -> int:
    """The smallest budget of `tier`, the lowest in memory, with those above it as they are."""
    manager = state.manager
    above = [t.capacity for t in manager.tiers[:tier]]
    need = 0
    if tier:
        need = enough_below(at_once(trace, sizes), sizes, above[-1], disk=disk)
    if not disk:  # nothing can leave it: it holds all there is
        # One tier more than there are, so that the lowest is played too.
        plan = make_plan(trace, sizes, [*above, None, None], manager.policy, prefetch=False)
        need = max(need, plan.peak.get(tier, 0))
    return need


def _too_small(tier: str, budget: int, smallest: int) -> BudgetError:
    instead = (
        "Less would do with activation checkpointing, a smaller micro-batch, or a smaller "
        "patrickstar.chunk_size"
    )
    if tier == "disk":
        instead = (
            "Raise patrickstar.memory.disk.size if it was given, or free so much of the disk under "
            "patrickstar.memory.disk.path; less would do with more memory"
        )
    return BudgetError(
        f"the {tier} budget of {format_budget(budget)} is too small for this model on "
        f"these inputs. The smallest that works is {size_at_least(smallest)} ({smallest} bytes). "
        f"{instead}",
        tier=tier,
        budget=budget,
        smallest=smallest,
    )
