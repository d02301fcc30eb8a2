"""What of a run goes into a checkpoint, and how it is read out of the chunks.

Tensors are stored by the names of the user's module, whole: how they lie in chunks, on which tier,
and whether they are kept in pieces is the business of the run that saves, not of the one that
loads. With several ranks they are gathered, and the first rank writes them (see `together`). They
are written in the order in which they lie in the chunks, so each chunk is fetched once for each
kind of it, and one at a time: saving needs no memory beyond what the budgets hold anyway.

Under the name of a parameter the optimizer's file has `master/NAME`, a tensor for each state of the
optimizer (`exp_avg/NAME`), and in the middle of an accumulation `gradient/NAME`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from patrickstar.checkpoint import (
    SHARD_BYTES,
    TensorSource,
    check_name,
    encode,
    publish_weights,
    rng_state,
    write_checkpoint,
)
from patrickstar.engine.aligned import AlignedChunks
from patrickstar.engine.construct import view_of
from patrickstar.engine.contents import (
    GRADIENT,
    MASTER,
    Member,
    Training,
    members,
    other_tensors,
)
from patrickstar.engine.ranks import Ranks
from patrickstar.engine.saving_alone import Offer, sources_of_others
from patrickstar.engine.together import Part, Walk, write_together
from patrickstar.errors import CheckpointError
from patrickstar.memory import Access, Chunk, CpuTier, Use


def wanted_weights(training: Training, *, frozen: bool = True) -> list[Wanted]:
    """The model's parameters in the training precision."""
    return [
        Wanted(member.name, member, _parameter_chunk, (True,) * len(member.parts))
        for member in members(training)
        if frozen or member.parts[0].aligned.gradient is not None
    ]


def wanted_states(training: Training) -> list[Wanted]:
    """Master weights, the optimizer's states, and gradients of an incomplete accumulation."""
    everything, found = members(training), []
    for member in everything:
        if member.parts[0].aligned.master is not None:
            always = (True,) * len(member.parts)
            found.append(Wanted(f"{MASTER}/{member.name}", member, _master_chunk, always))
    for name in {name: None for aligned in training.state.aligned for name in aligned.states}:
        for member in everything:
            started = tuple(name in p.aligned.states and p.aligned.started for p in member.parts)
            if any(started):
                key, initial = f"{name}/{member.name}", _initial(training, name)
                found.append(Wanted(key, member, _state_chunk(name), started, initial))
    for member in everything:
        there = tuple(part.slot.has_grad for part in member.parts)
        if any(there):
            found.append(Wanted(f"{GRADIENT}/{member.name}", member, _gradient_chunk, there))
    return found


def buffer_sources(training: Training) -> list[TensorSource]:
    """What of the model lives in no chunk."""
    return [TensorSource.of(name, t) for name, t in other_tensors(training).items()]


def sources_of(
    training: Training,
    walk: Walk,
    wanted: Sequence[Wanted],
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> list[TensorSource]:
    """What is wanted, of all ranks, as the next of `walk`.

    Args:
        others: what is wanted and lives in no chunk.
    """
    ranks, stored = training.state.ranks, training.state.stored
    first = ranks is None or ranks.is_first
    sources = [one.source(training, walk) for one in wanted if first or not one.member.alone]
    sources += [TensorSource.of(key, tensor) for key, tensor in others.items()]
    if ranks is not None and stored.anywhere:
        offers = [one.offer(training) for one in wanted if one.member.alone]
        alone = set(stored.own.values())
        offers += [_ready(key, tensor) for key, tensor in others.items() if key in alone]
        sources += sources_of_others(ranks, walk, offers)
    return sources


def _ready(key: str, tensor: torch.Tensor) -> Offer:
    """What lives in no chunk."""

    def part() -> AbstractContextManager[torch.Tensor]:
        return nullcontext(tensor)

    return Offer(key, tensor.dtype, tuple(tensor.shape), (tensor.numel(),), (part,))


def save(
    training: Training,
    folder: Path,
    tag: str,
    client_state: dict[str, Any],
    *,
    keep: int | None = None,
    latest: bool = True,
    frozen: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the checkpoint `folder/tag`.

    Args:
        keep: how many checkpoints `folder` has at most afterwards; None keeps all.
        latest: whether it becomes the latest.
        frozen: whether parameters that are not trained are in it; if not, it can only be loaded
            into a model that has them already.
    """
    # The accesses that follow are no part of the iteration that may be running.
    training.state.manager.abandon_iteration()
    refuse_unreduced(training)
    weights, walk = wanted_weights(training, frozen=frozen), Walk()
    sources = sources_of(training, walk, weights, other_tensors(training))
    states = sources_of(training, walk, wanted_states(training))
    state = run_state(training, client_state, weights)

    def write() -> None:
        write_checkpoint(
            folder,
            tag,
            sources,
            states,
            state,
            extra_files=config_file(training.module),
            keep=keep,
            latest=latest,
            shard_bytes=shard_bytes,
        )

    write_together(training.state.ranks, walk, write)
    return folder / tag


def save_weights(
    training: Training,
    folder: Path,
    name: str,
    *,
    frozen: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights alone to `folder`, in the training precision, for use elsewhere.

    Files that are there already are replaced one by one, each in one step, the index last.
    """
    stem = check_name(name, "the name of the weights").removesuffix(".safetensors")
    stem = "model" if stem == "pytorch_model.bin" else stem.removesuffix(".bin")
    training.state.manager.abandon_iteration()
    weights, walk = wanted_weights(training, frozen=frozen), Walk()
    sources = sources_of(training, walk, weights, other_tensors(training))

    def write() -> None:
        publish_weights(folder, stem, sources, config_file(training.module), shard_bytes)

    write_together(training.state.ranks, walk, write)


def refuse_unreduced(training: Training) -> None:
    """With several ranks, gradients that are not reduced yet belong to no checkpoint.

    Raises:
        CheckpointError: there are some on some rank.
    """
    ranks = training.state.ranks
    slots = [slot for _, slot in training.state.slots.values()]
    if ranks is not None and any(ranks.anywhere([any(slot.is_local for slot in slots)])):
        raise CheckpointError(
            "there are gradients of single ranks, made under no_sync, which a checkpoint cannot "
            "hold; save after a backward without no_sync, or after the step"
        )


def run_state(
    training: Training, client_state: dict[str, Any], weights: list[Wanted]
) -> dict[str, Any]:
    """Everything that is no tensor of the model or the optimizer, as JSON.

    Args:
        weights: those that the checkpoint will have.
    """
    kept = {wanted.key for wanted in weights}
    parameters = {
        m.name: [part.progress().to_json() for part in m.parts] for m in members(training)
    }
    excluded = [name for name in parameters if name not in kept]
    ranks = training.state.ranks
    if ranks is not None and training.state.stored.anywhere:
        told = "the progress of what ranks have alone"
        for others, left_out in ranks.comm.control.exchange_json(told, (parameters, excluded)):
            parameters = {**others, **parameters}
            excluded += [name for name in left_out if name not in excluded]
    optimizer, scaler = training.optimizer, training.precision.scaler
    scheduler, stepping = training.stepping.scheduler, training.stepping
    return {
        "counters": dict(vars(training.counters)),
        "precision": training.precision.name,
        "loss_scale": _stateful(scaler, "loss scale"),
        "grad_norm": encode(stepping.grad_norm, "grad_norm"),
        "applied": stepping.applied,
        "optimizer": {
            "type": training.state.rule.name,
            "groups": [
                {
                    key: encode(value, f"parameter group {index}[{key!r}]")
                    for key, value in group.items()
                    if key != "params"
                }
                for index, group in enumerate(optimizer.param_groups)
            ],
        },
        "parameters": parameters,
        "scheduler": _stateful(scheduler, "scheduler"),
        "data": _stateful(training.data, "data position"),
        "rng": _of_every_rank(training.state.ranks, rng_state()),
        "excluded": excluded,
        "tied": _tied(training),
        "extra_state": _extra_states(training.module),
        "client": encode(client_state, "client_state"),
    }


def _of_every_rank(ranks: Ranks | None, mine: dict[str, Any]) -> list[dict[str, Any]]:
    if ranks is None:
        return [mine]
    return ranks.comm.control.exchange_json("random states", mine)


def config_file(module: nn.Module) -> dict[str, bytes]:
    """The `config.json` of a Hugging Face model, which makes its checkpoint loadable there."""
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    if not callable(to_json):
        return {}
    try:
        config = json.loads(to_json())
    except (TypeError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    config.setdefault("architectures", [type(module).__name__])
    return {"config.json": (json.dumps(config, indent=2) + "\n").encode()}


@dataclass(frozen=True)
class Wanted:
    """A tensor that a checkpoint is to have, out of the chunks of one kind.

    Attributes:
        has_values: for each part, whether the chunk has values for it; `initial` stands for them
            where it has not.
    """

    key: str
    member: Member
    chunk_of: Callable[[AlignedChunks], Chunk | None]
    has_values: tuple[bool, ...]
    initial: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        chunk = self.chunk_of(self.member.parts[0].aligned)
        assert chunk is not None, self.key
        return chunk.dtype

    def source(self, training: Training, walk: Walk) -> TensorSource:
        """For a checkpoint that is written now, as the next of `walk`."""
        return walk.source(self.key, self.dtype, self.member.shape, self._parts(training))

    def offer(self, training: Training) -> Offer:
        """For a checkpoint that another rank writes."""
        lengths = tuple(part.slot.numel for part in self.member.parts)
        parts = tuple(self._parts(training))
        return Offer(self.key, self.dtype, self.member.shape, lengths, parts)

    def _parts(self, training: Training) -> list[Part]:
        numbers = range(len(self.member.parts))
        return [functools.partial(self.values, training, number) for number in numbers]

    @contextmanager
    def values(
        self, training: Training, number: int, *, in_use: bool = False
    ) -> Iterator[torch.Tensor]:
        """The values of part `number`, where they lie; valid inside the context.

        Args:
            in_use: the chunk is in use already, on the tier that updates run on.
        """
        part = self.member.parts[number]
        chunk, slot, manager = self.chunk_of(part.aligned), part.slot, training.state.manager
        if chunk is None or not self.has_values[number]:
            yield torch.full(slot.shape, self.initial, dtype=self.dtype)
            return
        if in_use:
            flat = manager.tensor(chunk, training.state.update_tier)
            yield view_of(flat, slot.offset, slot.shape, slot.stride)
            return
        # Where it is quickest to read, if that is CPU memory; where updates run otherwise.
        fast = manager.ledger.is_valid(chunk.id, 0) and isinstance(manager.tiers[0], CpuTier)
        tier = 0 if fast else training.state.update_tier
        with manager.use([Use(chunk.id, Access.READ, tier)]):
            yield view_of(manager.tensor(chunk, tier), slot.offset, slot.shape, slot.stride)


def _parameter_chunk(aligned: AlignedChunks) -> Chunk | None:
    return aligned.parameter


def _master_chunk(aligned: AlignedChunks) -> Chunk | None:
    return aligned.master


def _gradient_chunk(aligned: AlignedChunks) -> Chunk | None:
    return aligned.gradient


def _state_chunk(name: str) -> Callable[[AlignedChunks], Chunk | None]:
    return lambda aligned: aligned.states.get(name)


def _tied(training: Training) -> dict[str, str]:
    """Further names of parameters that have several, with the name they are stored under."""
    first: dict[int, str] = {}
    further = {}
    for name, parameter in training.module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            further[name] = training.state.stored.of(first[id(parameter)])
    return further


def _initial(training: Training, name: str) -> float:
    specifications = (
        specification
        for group in training.optimizer.param_groups
        for specification in training.state.rule.states(group)
    )
    return next((s.init for s in specifications if s.name == name), 0.0)


def _stateful(owner: Any | None, what: str) -> Any:
    """The state of something with `state_dict`, with the name of its class."""
    if owner is None:
        return None
    return {"type": type(owner).__name__, "state": encode(owner.state_dict(), what)}


def _extra_states(module: nn.Module) -> dict[str, Any]:
    """What modules of the user keep with `get_extra_state`."""
    found = {}
    for name, owner in module.named_modules():
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            found[name] = encode(
                owner.get_extra_state(), f"the extra state of {name or 'the model'}"
            )
    return found
