"""Operators that need the whole of a parameter in pieces.

The whole is put together for as long as the operator runs, if the budget has room for it. Its
result must be new: a write to a view of the whole would never reach the pieces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from patrickstar.engine.parameter import LEAKS
from patrickstar.errors import PatrickStarError
from patrickstar.memory import format_bytes


class PiecesError(PatrickStarError, RuntimeError):
    """An operator cannot be carried out on a parameter that is kept in pieces."""


class Whole(torch.autograd.Function):
    """`torch.cat` of pieces, of which one at a time has to be there."""

    @staticmethod
    def forward(ctx: Any, *pieces: Any) -> torch.Tensor:
        ctx.rows = [piece.shape[0] for piece in pieces]
        first = pieces[0]
        whole = torch.empty(
            (sum(ctx.rows), *first.shape[1:]), dtype=first.dtype, device=first.device
        )
        for place, piece in zip(torch.split(whole, ctx.rows), pieces, strict=True):
            place.copy_(piece)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return tuple(torch.split(grad, ctx.rows))


def put_together(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Any]) -> Any:
    """Call an operator that makes a new tensor on the wholes of its parameters in pieces.

    Args:
        found: the parameters in pieces among its arguments.

    Raises:
        PiecesError: there is no room for the whole, or a write to it could be lost.
    """
    name = getattr(func, "__name__", "")
    if name in LEAKS or name in ("__set__", "__delete__"):
        raise _refusal(func, found, "it could change the whole")
    manager = found[0]._home.manager
    account = manager.ledger.tiers[0]
    nbytes, before = sum(parameter.nbytes for parameter in found), account.other
    if account.capacity is not None and nbytes > account.capacity:
        why = f"the whole has {format_bytes(nbytes)}, more than the {account.name} budget"
        raise _refusal(func, found, why)
    manager.set_other(0, before + nbytes)
    try:
        wholes: dict[int, torch.Tensor] = {}
        for parameter in found:
            wholes[id(parameter)] = Whole.apply(*parameter.pieces)  # type: ignore[no-untyped-call]
        result = func(*exchanged(args, wholes), **exchanged(kwargs, wholes))
    finally:
        manager.set_other(0, before)
    storages = {whole.untyped_storage()._cdata for whole in wholes.values()}
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if any(t.layout is torch.strided and t.untyped_storage()._cdata in storages for t in made):
        raise _refusal(func, found, "its result would be a view of the whole")
    return result


def exchanged(values: Any, wholes: dict[int, torch.Tensor]) -> Any:
    """`values` with these tensors, by id, in the place of others."""
    return tree_map(lambda leaf: wholes.get(id(leaf), leaf), values)


def _refusal(func: Any, found: list[Any], why: str) -> PiecesError:
    name, shape = getattr(func, "__name__", str(func)), tuple(found[0].shape)
    return PiecesError(
        f"{name} was called on a parameter of shape {shape}, which is kept in pieces because "
        f"it is longer than patrickstar.piece_size: {why}. Pieces can be used by linear, "
        "embedding, elementwise in-place operators and, where there is room for the whole, by "
        "those that make new tensors. Raise patrickstar.piece_size to keep it whole"
    )
