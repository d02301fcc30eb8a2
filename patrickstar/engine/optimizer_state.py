"""The optimizer's `state_dict`, in the form of `torch.optim`.

Whoever calls `optimizer.state_dict()` expects the moments in it, and to go on with them, here or in
an ordinary loop. So they are gathered: whole tensors by the index of the parameter, as
`torch.optim` numbers them, with "step" and, in a run in 16 bits, "master". That needs memory for
all of them; `save_checkpoint` does not, and keeps everything else of a run too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from patrickstar.engine.aligned import AlignedChunks, Slot
from patrickstar.engine.construct import view_of
from patrickstar.engine.pieces import whole_name
from patrickstar.engine.state import ModelState
from patrickstar.errors import CheckpointError
from patrickstar.memory import Access, Chunk, Use

MASTER = "master"
_OF_TORCH_ONLY = {"params", "fused", "foreach", "capturable", "differentiable"}
_OF_TORCH_ONLY |= {"decoupled_weight_decay", "maximize"}
Places = list[tuple[AlignedChunks, Slot]]
"""Where a parameter lies: one place, or one for each of its pieces in order."""


def gather(state: ModelState, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """`{"state": {index: tensors by name}, "param_groups": [...]}`, copied out of the chunks."""
    state.manager.do_due()
    states: dict[int, dict[str, Any]] = {}
    made, number = [], 0
    for group in groups:
        parameters = list(_parameters(state, group))
        for index, places in enumerate(parameters, number):
            if any(aligned.started and slot.step for aligned, slot in places):
                states[index] = _tensors(state, places)
        numbers = list(range(number, number + len(parameters)))
        made.append({**{k: v for k, v in group.items() if k != "params"}, "params": numbers})
        number += len(parameters)
    return {"state": states, "param_groups": made}


def scatter(state: ModelState, groups: list[dict[str, Any]], loaded: Mapping[str, Any]) -> None:
    """Take over what `gather`, or an optimizer of `torch.optim` with the same formula, returned.

    Raises:
        CheckpointError: it does not fit; nothing has been changed then.
    """
    state.manager.do_due()
    theirs = _field(loaded, "param_groups", list)
    states = _field(loaded, "state", dict)
    if [len(_field(g, "params", list)) for g in theirs] != [
        len(list(_parameters(state, group))) for group in groups
    ]:
        raise CheckpointError(
            "the optimizer's state has other parameter groups than this optimizer: "
            f"{[len(g['params']) for g in theirs]} parameters against "
            f"{[len(list(_parameters(state, group))) for group in groups]}"
        )
    updates = [_hyperparameters(*both) for both in zip(groups, theirs, strict=True)]
    places: dict[int, Places] = {}
    for group, other in zip(groups, theirs, strict=True):
        places.update(zip(other["params"], _parameters(state, group), strict=True))
    for index, there in places.items():
        _check(state, index, there, states.get(index, {}))
    for group, update in zip(groups, updates, strict=True):
        group.update(update)
    known = {id(slot): states.get(i, {}) for i, there in places.items() for _, slot in there}
    for aligned in state.aligned:
        if aligned.gradient is not None:
            _load(state, groups[aligned.group], aligned, known, places)


def _parameters(state: ModelState, group: Mapping[str, Any]) -> Iterator[Places]:
    """The parameters of a group, those in pieces as one."""
    placed = [state.of(parameter) for parameter in group["params"]]
    for _, pieces in itertools.groupby(placed, key=lambda place: whole_name(place[1].name)):
        yield list(pieces)


def _tensors(state: ModelState, places: Places) -> dict[str, Any]:
    names = list(places[0][0].states)
    if places[0][0].master is not None:
        names.append(MASTER)
    made: dict[str, Any] = {"step": torch.tensor(float(max(slot.step for _, slot in places)))}
    for name in names:
        parts = [_read(state, chunk, slot) for chunk, slot in _chunks(places, name)]
        made[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return made


def _chunks(places: Places, name: str) -> Iterator[tuple[Chunk, Slot]]:
    for aligned, slot in places:
        chunk = aligned.master if name == MASTER else aligned.states[name]
        assert chunk is not None
        yield chunk, slot


def _read(state: ModelState, chunk: Chunk, slot: Slot) -> torch.Tensor:
    tier = state.update_tier
    with state.manager.use([Use(chunk.id, Access.READ, tier)]):
        flat = state.manager.tensor(chunk, tier)
        return view_of(flat, slot.offset, slot.shape, slot.stride).cpu().clone()


def _load(
    state: ModelState,
    group: Mapping[str, Any],
    aligned: AlignedChunks,
    known: dict[int, Mapping[str, Any]],
    places: dict[int, Places],
) -> None:
    """Fill the chunks of some parameters; those that nothing is known of begin anew."""
    first = _first_rows(places)
    initial = {specification.name: specification.init for specification in state.rule.states(group)}
    targets = {**aligned.states, **({} if aligned.master is None else {MASTER: aligned.master})}
    aligned.started = any(known[id(slot)] for slot in aligned.slots)
    for name, chunk in targets.items():
        with state.manager.use([Use(chunk.id, Access.UPDATE, state.update_tier)]):
            flat = state.manager.tensor(chunk, state.update_tier)
            for slot in aligned.slots:
                view = view_of(flat, slot.offset, slot.shape, slot.stride)
                values = known[id(slot)].get(name)
                if values is not None:
                    start = first[id(slot)]
                    view.copy_(values[start : start + slot.shape[0]] if slot.shape else values)
                elif name != MASTER:
                    view.fill_(initial[name])
    for slot in aligned.slots:
        # SGD of torch has no step; whoever has states has made one.
        slot.step = int(known[id(slot)].get("step", 1)) if known[id(slot)] else 0


def _first_rows(places: dict[int, Places]) -> dict[int, int]:
    """The first row of each slot in its whole parameter."""
    found = {}
    for there in places.values():
        row = 0
        for _, slot in there:
            found[id(slot)] = row
            row += slot.shape[0] if slot.shape else 0
    return found


def _hyperparameters(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [k for k, v in theirs.items() if k not in ours and k not in _OF_TORCH_ONLY and v]
    unknown = [key for key in unknown if key != "initial_lr"]  # of a scheduler
    if unknown:
        raise CheckpointError(
            f"the optimizer's state has the hyperparameters {unknown}, which this optimizer has "
            "not; it is of another kind"
        )
    return {k: v for k, v in theirs.items() if k != "params" and (k in ours or k == "initial_lr")}


def _check(state: ModelState, index: int, places: Places, tensors: Any) -> None:
    name = whole_name(places[0][1].name)
    if not isinstance(tensors, Mapping):
        raise CheckpointError(f"the optimizer's state of {name!r} is no dict")
    rows = sum(slot.shape[0] for _, slot in places if slot.shape)
    shape = (rows, *places[0][1].shape[1:]) if places[0][1].shape else ()
    if not tensors or places[0][0].gradient is None:
        return
    for key in places[0][0].states:
        found = tensors.get(key)
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != shape:
            what = tuple(found.shape) if isinstance(found, torch.Tensor) else "missing"
            raise CheckpointError(
                f"the optimizer's state of {name!r} (parameter {index}) does not fit: {key!r} is "
                f"{what}, and {shape} is needed"
            )


def _field(values: Any, key: str, kind: type) -> Any:
    found = values.get(key) if isinstance(values, Mapping) else None
    if not isinstance(found, kind):
        raise CheckpointError(
            f"the optimizer's state has no {key!r}; give what optimizer.state_dict() returned"
        )
    return found
