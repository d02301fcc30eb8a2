"""Refusing a budget with the smallest one that works.

A budget that is too small shows at the first moment that does not fit. What the rest of the
iteration would need is found by rehearsing it, so that the user is told one number that works and
not a chain of numbers that get one moment further each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from patrickstar.engine.pieces import PiecedParameter
from patrickstar.engine.rehearsal import OperatorSink, RehearsedChunks, rehearse
from patrickstar.engine.state import ModelState
from patrickstar.engine.updating import update_uses
from patrickstar.errors import BudgetError
from patrickstar.memory import Trace, Use, format_bytes, make_plan

_MARGIN = 64 << 10


def shapes_of(inputs: Any) -> Any:
    """`inputs` with tensors that have shapes and dtypes only."""
    return tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device="meta"), inputs)


def rehearsed_trace(
    module: nn.Module,
    state: ModelState,
    inputs: Any,
    base: int,
    sink: OperatorSink | None = None,
) -> Trace:
    """The trace of one iteration of an engine's model on inputs of these shapes.

    Args:
        base: bytes that are always there and no chunk owns.
        sink: is told of every operator.
    """
    chunks: dict[str, RehearsedChunks] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, PiecedParameter):
            raise NotImplementedError("parameters in pieces are not rehearsed")
        if id(parameter) in state.slots:
            aligned, _ = state.of(parameter)
            gradient = None if aligned.gradient is None else aligned.gradient.id
            chunks[name] = RehearsedChunks(aligned.parameter.id, gradient)
    tier = state.update_tier
    updates: list[tuple[tuple[Use, ...], int | None]] = [
        (update_uses(aligned, tier, remade=True), aligned.gradient.id)
        for aligned in state.aligned
        if aligned.gradient is not None
    ]
    kinds = state.specification
    return rehearse(
        module,
        inputs,
        chunks,
        updates,
        dtype=kinds.dtype,
        grad_dtype=kinds.grad_dtype,
        base=base,
        sink=sink,
    )


def _excess(real: Trace | None, rehearsed: Trace) -> int:
    """By how many bytes the memory of real operators exceeded that of rehearsed ones so far."""
    most, seen = 0, (0, 0)
    for there, here in zip(real.moments if real else [], rehearsed.moments, strict=False):
        seen = max(seen[0], there.other.get(0, 0)), max(seen[1], here.other.get(0, 0))
        most = max(most, seen[0] - seen[1])
    return most


def with_smallest(
    error: BudgetError, module: nn.Module, state: ModelState, inputs: Any, base: int
) -> BudgetError:
    """`error`, naming the smallest budget for the whole iteration if it can be found out."""
    try:
        trace = rehearsed_trace(module, state, inputs, base)
    except Exception:  # a path that depends on data: the first number is all there is
        return error
    manager = state.manager
    sizes = {chunk.id: chunk.nbytes for aligned in state.aligned for chunk in aligned.chunks()}
    # One tier more than there are, so that the lowest is played too.
    unlimited = [None for _ in [*manager.tiers, None]]
    plan = make_plan(trace, sizes, unlimited, manager.policy, prefetch=False)
    tier = [t.name for t in manager.tiers].index(error.tier)
    lowest = tier + 1 == len(manager.tiers)  # nothing can leave it: it holds all there is
    found = plan.peak if lowest else plan.smallest
    smallest = max(found.get(tier, 0), error.smallest)
    # Real kernels may keep more than the fake ones (packed weights, workspaces): by how much more
    # is seen where both have been.
    smallest += smallest // 64 + 2 * _excess(manager.abandoned, trace) + _MARGIN
    return BudgetError(
        f"the {error.tier} budget of {format_bytes(error.budget)} is too small for this model on "
        f"these inputs. The smallest that works is {format_bytes(smallest)} ({smallest} bytes). "
        "Less would do with activation checkpointing, a smaller micro-batch, or a smaller "
        f"patrickstar.chunk_size. ({error})",
        tier=error.tier,
        budget=error.budget,
        smallest=smallest,
    )
