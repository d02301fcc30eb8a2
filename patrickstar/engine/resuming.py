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

from patrickstar.checkpoint import Checkpoint, TensorSet, decode, set_rng_state
from patrickstar.checkpoint.fields import field, taking_over
from patrickstar.checkpoint.progress import Progress
from patrickstar.engine.agreement import What, agree, counters_of, groups_of, progress_of_part
from patrickstar.engine.aligned import AlignedChunks
from patrickstar.engine.construct import view_of
from patrickstar.engine.contents import (
    GRADIENT,
    MASTER,
    Counters,
    Member,
    Part,
    Training,
    members,
    other_tensors,
)
from patrickstar.engine.ranks import Ranks
from patrickstar.engine.together import open_together
from patrickstar.errors import CheckpointError
from patrickstar.memory import Access, Chunk, Use

_PLAIN = torch._C.DisableTorchFunctionSubclass


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
    progress = _agreed(training, checkpoint, found, what)
    groups = groups_of(training, state) if what.optimizer else []
    counters = counters_of(training, state, progress, what)
    places = {
        part.slot.index: _Place(member, part, progress_of_part(progress, member, part))
        for member in found
        for part in member.parts
    }
    training.segments.abandon()
    training.gradients.clear()
    if training.state.sharding is not None:
        training.state.sharding.settle()
    with _half_done(checkpoint, training.state.ranks):
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
            ranks, states = training.state.ranks, field(state, "rng", list)
            own = 0 if ranks is None else ranks.place
            for rng in states[own : own + 1]:  # ranks that were not there keep theirs
                set_rng_state(rng)
    return client, counters


def _agreed(
    training: Training, checkpoint: Checkpoint, found: list[Member], what: What
) -> dict[str, list[Progress]]:
    """What `agree` says; if it fits one rank and not another, all of them learn of it."""
    ranks = training.state.ranks
    if ranks is None or not training.state.stored.anywhere:
        return agree(training, checkpoint, found, what)
    progress, failure = {}, None
    try:
        progress = agree(training, checkpoint, found, what)
    except CheckpointError as error:
        failure = error
    texts = ranks.comm.control.exchange_bytes(
        "whether a checkpoint fits", b"" if failure is None else str(failure).encode()
    )
    if failure is not None:
        raise failure
    for rank, text in zip(ranks.comm.topology.ranks, texts, strict=True):
        if text:
            raise CheckpointError(f"rank {rank} says: {text.decode()}")
    return progress


@contextmanager
def _half_done(checkpoint: Checkpoint, ranks: Ranks | None) -> Iterator[None]:
    """An error inside says that the run has been changed in part; other ranks learn of it."""
    try:
        yield
    except CheckpointError as error:
        if ranks is not None:
            ranks.comm.stumbled(error)
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
            _fill(training, chunk, aligned.name, places, sources)
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
        training.state.clear(chunk)
        if aligned.started:
            sources = [
                (checkpoint.optimizer, f"{name}/{p.member.name}") if p.progress.started else None
                for p in places
            ]
            _fill(training, chunk, aligned.name, places, sources, initial.get(name, 0.0))
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
    name: str,
    places: list[_Place],
    sources: list[tuple[TensorSet, str] | None],
    initial: float | None = None,
) -> None:
    """Read a chunk's tensors from their sources; where there is none, it keeps what it has.

    Of a chunk that every rank has whole, each rank reads its part, and gets the others' from them.
    No view of the chunk outlives this: one would keep it from leaving.
    """
    manager, tier = training.state.manager, training.state.update_tier
    ranks, sharding = training.state.ranks, training.state.sharding
    own, start, part, is_whole = chunk, 0, slice(None), False
    shared = ranks is not None and not places[0].member.alone
    if sharding is not None and sharding.is_sharded(chunk):
        halves = sharding.of(chunk)
        own, start = halves.own, halves.start
    elif shared and any(source is not None for source in sources):
        assert ranks is not None
        start, stop = ranks.own(chunk.numel)
        part, is_whole = slice(start, stop), True
    with manager.use([Use(own.id, Access.UPDATE, tier)]), torch.no_grad():
        flat = manager.tensor(own, tier)
        if initial is not None:
            flat.fill_(initial)
        for place, source in zip(places, sources, strict=True):
            if source is not None:
                _read(place, source, flat[part], start)
    if is_whole:
        assert ranks is not None
        with manager.use([Use(chunk.id, Access.UPDATE)]), torch.no_grad():
            ranks.gather(f"{chunk.kind} {name}", manager.tensor(chunk)).wait()


def _read(place: _Place, source: tuple[TensorSet, str], flat: torch.Tensor, start: int) -> None:
    """Read what of a tensor lies in `flat`, which is a chunk from element `start` on.

    A rank reads no more than its part, so the ranks of a host read a checkpoint once together.
    """
    (tensors, key), slot = source, place.part.slot
    low = max(slot.offset, start)
    high = min(slot.offset + slot.numel, start + flat.numel())
    if low >= high:
        return
    if high - low == slot.numel:
        where = int(flat.storage_offset()) + low - start
        view = view_of(flat, where, slot.shape, slot.stride)
        tensors.read_into(key, view, place.part.first)
        return
    here = flat[low - start : high - start]
    if slot.stride == torch.empty(slot.shape, device="meta").stride():
        tensors.read_into(key, here, place.part.first + low - slot.offset)
        return
    whole = torch.empty_strided(slot.shape, slot.stride, dtype=flat.dtype)
    tensors.read_into(key, whole, place.part.first)
    here.copy_(whole.as_strided((slot.numel,), (1,))[low - slot.offset : high - slot.offset])


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
    with open_together(training.state.ranks, folder, tag) as checkpoint:
        return checkpoint.path, *resume(training, checkpoint, what)
