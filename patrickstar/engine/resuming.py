"""A run goes on from a checkpoint, whatever its budgets, chunks, pieces and precision are.

Everything that can be compared is compared first, and every difference is named in one error; only
then is anything changed. Tensors are read from the files straight into the chunks, one chunk at a
time, so loading needs no memory beyond what the budgets hold anyway.

Where the precision differs, weights and master weights are made from the most precise values that
the checkpoint has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint import Checkpoint, TensorSet, decode, open_checkpoint, set_rng_state
from patrickstar.checkpoint.fields import count, field, taking_over
from patrickstar.checkpoint.progress import Progress, progress_of
from patrickstar.engine.construct import view_of
from patrickstar.engine.saving import (
    GRADIENT,
    MASTER,
    Counters,
    Member,
    Part,
    Training,
    members,
    other_tensors,
)
from patrickstar.engine.state import AlignedChunks
from patrickstar.errors import CheckpointError
from patrickstar.memory import Access, Chunk, Use

_PLAIN = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True)
class What:
    """What is taken from a checkpoint.

    Attributes:
        optimizer: moments, step counts, gradients, loss scale, hyperparameters.
        scheduler: the position of the learning-rate schedule.
        progress: counters, random states, the position in the data.
        strict: the checkpoint must have exactly the model's weights.
    """

    optimizer: bool = True
    scheduler: bool = True
    progress: bool = True
    strict: bool = True


def resume(
    training: Training, checkpoint: Checkpoint, what: What
) -> tuple[dict[str, Any], Counters]:
    """Take everything over from an open checkpoint.

    Returns:
        the `client_state` that was saved, and the counters to go on with.

    Raises:
        CheckpointError: the checkpoint does not fit; nothing has been changed then, unless the
            message says so.
    """
    state = checkpoint.state
    client: dict[str, Any] = decode(field(state, "client", dict), "client_state")
    if not isinstance(client, dict):
        raise CheckpointError("client_state in the checkpoint is no dict")
    found = members(training)
    progress = _progress(state, found)
    problems = _differences(training, checkpoint, found, what)
    if what.optimizer:
        problems += _optimizer_differences(training, checkpoint, found, progress)
    if problems:
        more = f"; and {len(problems) - 8} more differences" if len(problems) > 8 else ""
        raise CheckpointError(
            f"the checkpoint in {str(checkpoint.path)!r} does not fit this run: "
            f"{'; '.join(problems[:8])}{more}"
        )
    groups = _groups(training, state) if what.optimizer else []
    counters = _counters(training, state, progress) if what.progress else training.counters
    places = {
        part.slot.index: _Place(member, part, _of_part(progress, member, part))
        for member in found
        for part in member.parts
    }
    training.segments.abandon()
    training.gradients.clear()
    with _half_done(checkpoint):
        for aligned in training.state.aligned:
            here = [places[slot.index] for slot in aligned.slots]
            _load_chunks(training, checkpoint, aligned, here)
            if what.optimizer:
                _load_progress(training, checkpoint, aligned, here)
        _load_others(training, checkpoint, state)
        if what.scheduler:
            _load_stateful(state, "scheduler", training.stepping.scheduler)
        if what.optimizer:
            _load_stateful(state, "loss_scale", training.precision.scaler)
        for group, loaded in zip(training.optimizer.param_groups, groups, strict=bool(groups)):
            group.update(loaded)
        if what.progress:
            norm = decode(state.get("grad_norm"), "grad_norm")
            training.stepping.grad_norm = None if norm is None else float(norm)
            training.stepping.applied = bool(state.get("applied"))
            _load_stateful(state, "data", training.data)
            for rng in field(state, "rng", list)[:1]:
                set_rng_state(rng)
    return client, counters


def _of_part(progress: dict[str, list[Progress]], member: Member, part: Part) -> Progress:
    if member.name not in progress:
        return Progress(0)
    return progress_of(member.name, progress[member.name], *part.rows)


# What is compared first


def _differences(
    training: Training, checkpoint: Checkpoint, found: list[Member], what: What
) -> list[str]:
    weights, excluded = checkpoint.weights, set(field(checkpoint.state, "excluded", list))
    shapes = {member.name: member.shape for member in found}
    shapes.update((name, tuple(t.shape)) for name, t in other_tensors(training).items())
    problems = []
    for name, shape in shapes.items():
        if name not in weights:
            if what.strict and name not in excluded:
                problems.append(f"it has no weight {name!r}")
        elif weights[name].shape != shape:
            problems.append(
                f"{name!r} has shape {list(weights[name].shape)}, in this model {list(shape)}"
            )
        elif not _alike(weights[name].dtype, training, name):
            problems.append(f"{name!r} has dtype {weights[name].dtype}")
    if what.strict:
        problems += [
            f"this model has no weight {name!r}" for name in weights.names() if name not in shapes
        ]
    return problems


def _alike(dtype: torch.dtype, training: Training, name: str) -> bool:
    """Whether values of `dtype` can be those of weight `name`; precisions may differ."""
    own = other_tensors(training).get(name)
    if own is None or own.is_floating_point():
        return dtype.is_floating_point
    return own.dtype is dtype


def _optimizer_differences(
    training: Training,
    checkpoint: Checkpoint,
    found: list[Member],
    progress: dict[str, list[Progress]],
) -> list[str]:
    saved, rule = field(checkpoint.state, "optimizer", dict), training.state.rule
    if saved.get("type") != rule.name:
        return [
            f"its optimizer is {str(saved.get('type'))[:80]!r}, this run's is {rule.name!r}; load "
            "with load_optimizer_states=False to start that anew"
        ]
    problems = []
    for member in found:
        aligned, entries = member.parts[0].aligned, progress.get(member.name, [])
        if aligned.gradient is None:
            continue
        keys = [f"{s}/{member.name}" for s in aligned.states if any(p.started for p in entries)]
        if any(part.gradient for part in entries):
            keys.append(f"{GRADIENT}/{member.name}")
        for key in (*keys, f"{MASTER}/{member.name}"):
            if key in checkpoint.optimizer:
                stored = checkpoint.optimizer[key]
                if stored.shape != member.shape or not stored.dtype.is_floating_point:
                    problems.append(
                        f"{key!r} is {stored.dtype} of shape {list(stored.shape)}, not "
                        f"floating-point of shape {list(member.shape)}"
                    )
            elif key in keys:
                problems.append(f"it has no tensor {key!r}")
    return problems


def _progress(state: dict[str, Any], found: list[Member]) -> dict[str, list[Progress]]:
    """What the checkpoint knows of each parameter."""
    entries = field(state, "parameters", dict)
    made = {}
    for member in found:
        ranges = entries.get(member.name)
        if ranges is None:
            continue
        if not isinstance(ranges, list):
            raise CheckpointError(f"the progress of {member.name!r} in state.json is no list")
        made[member.name] = [Progress.from_json(entry) for entry in ranges]
    return made


def _groups(training: Training, state: dict[str, Any]) -> list[dict[str, Any]]:
    """The hyperparameters of every group, checked by the rule that will use them."""
    groups, own = field(field(state, "optimizer", dict), "groups", list), training.optimizer
    if len(groups) != len(own.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(groups)} parameter groups, this run "
            f"{len(own.param_groups)}; build the same groups, or load with "
            "load_optimizer_states=False"
        )
    made = []
    for index, (group, present) in enumerate(zip(groups, own.param_groups, strict=True)):
        with taking_over(f"parameter group {index}"):
            loaded = decode(dict(group), f"parameter group {index}")
            loaded.pop("params", None)
            training.state.rule.check({**present, **loaded})
            made.append(loaded)
    return made


def _counters(
    training: Training, state: dict[str, Any], progress: dict[str, list[Progress]]
) -> Counters:
    """The counters to go on with.

    Where gradients are accumulated over another number of micro-batches than before, the
    accumulation begins anew; it cannot if there are gradients already.
    """
    saved = field(state, "counters", dict)
    steps, micro = count(saved, "global_steps"), count(saved, "micro_steps")
    before, now = count(saved, "accumulation_steps"), training.counters.accumulation_steps
    if before != now:
        if any(part.gradient for entries in progress.values() for part in entries):
            raise CheckpointError(
                f"the checkpoint was saved in the middle of an accumulation over {before} "
                f"micro-batches, and this run accumulates over {now}; use {before} until the next "
                "step, or load an older checkpoint"
            )
        micro = steps * now
    return Counters(steps, micro, count(saved, "skipped_steps"), now)


# What is then taken over


@contextmanager
def _half_done(checkpoint: Checkpoint) -> Iterator[None]:
    """An error inside says that the run has been changed in part."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. The state of this run has been replaced in part by that of "
            f"{str(checkpoint.path)!r}: load a complete checkpoint before training goes on"
        ) from error


@dataclass(frozen=True)
class _Place:
    """A parameter's rows in the chunks being filled, and what the checkpoint knows of them."""

    member: Member
    part: Part
    progress: Progress


def _load_chunks(
    training: Training, checkpoint: Checkpoint, aligned: AlignedChunks, places: list[_Place]
) -> None:
    for chunk in (aligned.parameter, aligned.master):
        if chunk is not None:
            sources = [_best_source(checkpoint, place.member.name, chunk) for place in places]
            _fill(training, chunk, places, sources)
    with _PLAIN():
        torch.autograd.graph.increment_version([slot.parameter for slot in aligned.slots])


def _load_progress(
    training: Training, checkpoint: Checkpoint, aligned: AlignedChunks, places: list[_Place]
) -> None:
    if aligned.gradient is None:
        return
    aligned.started = any(place.progress.started for place in places)
    aligned.changed = any(place.progress.changed for place in places)
    hyper = training.optimizer.param_groups[aligned.group]
    initial = {s.name: s.init for s in training.state.rule.states(hyper)}
    for name, chunk in aligned.states.items():
        training.state.manager.release(chunk)
        if aligned.started:
            sources = [
                (checkpoint.optimizer, f"{name}/{p.member.name}") if p.progress.started else None
                for p in places
            ]
            _fill(training, chunk, places, sources, initial.get(name, 0.0))
    for place in places:
        place.part.slot.step = place.progress.step
        if place.progress.gradient:
            key, slot = f"{GRADIENT}/{place.member.name}", place.part.slot
            gradient = torch.empty(slot.shape, dtype=aligned.gradient.dtype)
            checkpoint.optimizer.read_into(key, gradient, place.part.first)
            training.gradients.set(slot.parameter, gradient)


def _fill(
    training: Training,
    chunk: Chunk,
    places: list[_Place],
    sources: list[tuple[TensorSet, str] | None],
    initial: float | None = None,
) -> None:
    """Read a chunk's tensors from their sources; where there is none, it keeps what it has.

    No view of the chunk outlives this: one would keep it from leaving.
    """
    manager, tier = training.state.manager, training.state.update_tier
    with manager.use([Use(chunk.id, Access.UPDATE, tier)]), torch.no_grad():
        flat = manager.tensor(chunk, tier)
        if initial is not None:
            flat.fill_(initial)
        for place, source in zip(places, sources, strict=True):
            if source is not None:
                slot = place.part.slot
                view = view_of(flat, slot.offset, slot.shape, slot.stride)
                source[0].read_into(source[1], view, place.part.first)


def _best_source(checkpoint: Checkpoint, name: str, chunk: Chunk) -> tuple[TensorSet, str] | None:
    """Where the values of parameter `name` come from, for a chunk of parameters or of masters."""
    weights, master = checkpoint.weights, f"{MASTER}/{name}"
    exact = chunk.kind == "parameter" and name in weights and weights[name].dtype is chunk.dtype
    if not exact and master in checkpoint.optimizer:
        return checkpoint.optimizer, master
    return (weights, name) if name in weights else None


def _load_others(training: Training, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
    with torch.no_grad():
        for name, tensor in other_tensors(training).items():
            if name in checkpoint.weights:
                tensor.copy_(checkpoint.weights.read(name))
    extra = field(state, "extra_state", dict)
    for name, owner in training.module.named_modules():
        if name in extra and type(owner).set_extra_state is not torch.nn.Module.set_extra_state:
            with taking_over(f"the extra state of {name!r}"):
                owner.set_extra_state(decode(extra[name], f"the extra state of {name!r}"))


def _load_stateful(state: dict[str, Any], key: str, owner: Any | None) -> None:
    """Hand something with `load_state_dict` its state, if both sides have it."""
    saved = state.get(key)
    if owner is None or saved is None:
        return
    with taking_over(f"{key!r}"):
        kind = field(saved, "type", str)
        loaded = decode(field(saved, "state", dict), key)
        unknown = set(loaded) - set(owner.state_dict())
        if unknown or kind != type(owner).__name__:
            raise CheckpointError(
                f"the {key} in the checkpoint is a {kind[:80]} with {sorted(loaded)[:10]}, this "
                f"run's is a {type(owner).__name__}"
            )
        owner.load_state_dict(loaded)


def load(
    training: Training, folder: Path, tag: str | None, what: What
) -> tuple[Path, dict[str, Any], Counters]:
    """Go on from checkpoint `tag` of `folder`, or from the latest; see `resume`."""
    with open_checkpoint(folder, tag) as checkpoint:
        return checkpoint.path, *resume(training, checkpoint, what)
