"""What a run takes before its inputs are known: to build the model, and to update it.

A budget that is too small for that is refused before the first batch, naming one that is enough.
Where building itself comes to no end, the rest of the model is built without data to find that out
(`Nursery.on_paper`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patrickstar.engine.needs import Budgets, Needs, with_margin
from patrickstar.engine.on_paper import managed_on_paper
from patrickstar.engine.state import ModelState, StateSpecification, in_pieces
from patrickstar.errors import BudgetError
from patrickstar.memory import format_budget, format_bytes
from patrickstar.memory.sizes import size_at_least

if TYPE_CHECKING:
    from patrickstar.engine.initialize import RunSettings


_UPDATED = 16  # bytes of one weight while it is updated: itself, its gradient and two moments


def memory_of(settings: RunSettings) -> tuple[tuple[str, ...], Budgets]:
    """The names of the tiers in memory, fastest first, and their budgets."""
    if settings.device is None and settings.device_budget is None:
        return ("host",), (settings.host_budget,)
    return ("device", "host"), (settings.device_budget, settings.host_budget)


def specification_of(settings: RunSettings, first: str, budget: int | None) -> StateSpecification:
    """What the state of a run with `settings` consists of.

    Args:
        first, budget: the name and the budget of the fastest tier.
    """
    # Without a tier for the device, the host is it.
    update_on = settings.update_on if first == "device" else "host"
    return StateSpecification(
        settings.precision.dtype,
        settings.grad_dtype,
        settings.precision.low,
        settings.round_masters,
        settings.chunk_limit,
        settings.host_budget if update_on == "host" else budget,
        update_on,
    )


def needs_of(
    module: nn.Module,
    groups: Sequence[dict[str, Any]],
    settings: RunSettings,
    *,
    dtypes: Mapping[str, torch.dtype] | None,
    base: int,
) -> Needs:
    """What a run of `module` with `settings` needs, as far as it is known without its inputs.

    Args:
        dtypes: of the parameters while the model is built, see `dtypes_of`; None if it is built.
        base: bytes that are always there and no chunk owns.
    """
    names, budgets = memory_of(settings)
    return Needs(
        module,
        groups,
        settings.rule,
        specification_of(settings, names[0], budgets[0]),
        names,
        settings.policy,
        disk=settings.disk is not None,
        alone=None,
        backwards=settings.accumulation_steps,
        dtypes=dtypes,
        base=base,
    )


def dtypes_of(module: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes of the parameters, or of their pieces, by name."""
    return {name: parameter.dtype for name, parameter in in_pieces(module)}


def refused_to_build(
    error: BudgetError,
    module: nn.Module | None,
    groups: Sequence[dict[str, Any]],
    settings: RunSettings,
    *,
    built: Mapping[str, torch.dtype] | None = None,
    base: int = 0,
) -> BudgetError:
    """`error`, which came while `module` was built, with a budget that is enough.

    What the batches need is known later, and refused by itself.

    Args:
        module: as far as it is built; None if that is not known.
        built: if it is built, and its parameters are on their way into the layout: the dtypes that
            they had before (`dtypes_of`).
        base: bytes that are there then and no chunk owns.
    """
    smallest = error.smallest
    if settings.device is not None:  # half of the host's budget is for building
        smallest *= 2
    more = with_margin(smallest)
    names, budgets = memory_of(settings)
    alone = settings.device is None and settings.ranks is None
    if module is not None and alone:
        with nullcontext() if built else managed_on_paper(module):
            if not built:
                built, base = dtypes_of(module), sum(buffer.nbytes for buffer in module.buffers())
            needs = needs_of(module, groups, settings, dtypes=built, base=base)
            more = max(more, needs.judge(budgets).smallest[names.index(error.tier)])
    pieces = "" if module is None else _in_smaller_pieces(module, error.budget)
    return BudgetError(
        f"the {error.tier} budget of {format_budget(error.budget)} is too small to build this "
        f"model: it takes at least {size_at_least(more)} ({more} bytes), plus room for "
        f"activations{pieces}",
        tier=error.tier,
        budget=error.budget,
        smallest=more,
    )


def refuse_what_cannot_fit(
    state: ModelState,
    module: nn.Module,
    groups: Sequence[dict[str, Any]],
    settings: RunSettings,
    base: int,
) -> None:
    """An update holds all chunks of its weights at once; without room for that nothing works.

    Where no disk lies below, nothing works without room for the whole state either.
    """
    for name, budget, need, named in _lacking(state, module, groups, settings, base):
        largest = f"updating its largest chunk ({state.limit} weights) holds"
        if settings.disk is None and need > state.smallest_update() + base:
            largest = "its state, which has no disk to go to, takes"
        raise BudgetError(
            f"the {name} budget of {format_budget(budget)} is too small for this model: {largest} "
            f"{format_bytes(need)} at once. The smallest budget that works is "
            f"{size_at_least(named)} ({named} bytes) plus room for activations; "
            f"or set patrickstar.chunk_size lower{_in_smaller_pieces(module, budget)}",
            tier=name,
            budget=budget,
            smallest=named,
        )


def _in_smaller_pieces(module: nn.Module, budget: int) -> str:
    """What to do besides if one parameter alone is too large for `budget`."""
    wide = [(p.numel(), name) for name, p in in_pieces(module) if p.dim() > 1]
    numel, name = max(wide, default=(0, ""))
    fitting = 1 << max(budget // (3 * _UPDATED), 1).bit_length() - 1
    if numel <= fitting:
        return ""
    return (
        f"; or set patrickstar.piece_size to {fitting}, so that {name!r} ({numel} elements) is "
        "used in pieces, whose sums round differently from one product"
    )


def _lacking(
    state: ModelState,
    module: nn.Module,
    groups: Sequence[dict[str, Any]],
    settings: RunSettings,
    base: int,
) -> Iterator[tuple[str, int, int, int]]:
    """Tiers that are too small: name, budget, what it must hold at least, what is enough."""
    names, budgets = memory_of(settings)
    if settings.device is None and settings.ranks is None:
        needs = needs_of(module, groups, settings, dtypes=None, base=base)
        for tier, (budget, need) in enumerate(zip(budgets, needs.exact(budgets), strict=True)):
            if budget is not None and need > budget:
                yield names[tier], budget, need, needs.judge(budgets).smallest[tier]
        return
    account = state.manager.ledger.tiers[state.update_tier]
    need = state.smallest_update() + (account.other if state.update_tier == 0 else 0)
    if account.capacity is not None and need > account.capacity:
        yield account.name, account.capacity, need, with_margin(need)
