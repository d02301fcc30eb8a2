"""Whether a checkpoint fits a run.

Everything that can be compared is compared before anything is changed, and every difference is
named in one error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from patrickstar.checkpoint import Checkpoint, decode
from patrickstar.checkpoint.fields import count, field, taking_over
from patrickstar.checkpoint.header import StoredTensor
from patrickstar.checkpoint.progress import Progress, progress_of
from patrickstar.engine.contents import (
    GRADIENT,
    MASTER,
    Counters,
    Member,
    Part,
    Training,
    other_tensors,
)
from patrickstar.errors import CheckpointError

_MOST_NAMED = 8


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


def agree(
    training: Training, checkpoint: Checkpoint, found: list[Member], what: What
) -> dict[str, list[Progress]]:
    """What the checkpoint knows of each parameter of `found`.

    Raises:
        CheckpointError: weights or the optimizer differ, with the first few differences.
    """
    progress = _progress(checkpoint.state, found)
    problems = _weight_differences(training, checkpoint, found, what)
    if what.optimizer:
        problems += _optimizer_differences(training, checkpoint, found, progress)
    if problems:
        left = len(problems) - _MOST_NAMED
        more = f"; and {left} more differences" if left > 0 else ""
        raise CheckpointError(
            f"the checkpoint in {str(checkpoint.path)!r} does not fit this run: "
            f"{'; '.join(problems[:_MOST_NAMED])}{more}"
        )
    return progress


def progress_of_part(progress: dict[str, list[Progress]], member: Member, part: Part) -> Progress:
    if member.name not in progress:
        return Progress(0)
    return progress_of(member.name, progress[member.name], *part.rows)


def _weight_differences(
    training: Training, checkpoint: Checkpoint, found: list[Member], what: What
) -> list[str]:
    weights, excluded = checkpoint.weights, field(checkpoint.state, "excluded", list)
    others = other_tensors(training)
    shapes = {member.name: member.shape for member in found}
    shapes.update((name, tuple(tensor.shape)) for name, tensor in others.items())
    problems = []
    for name, shape in shapes.items():
        if name in weights:
            problems += _difference(name, weights[name], shape, others.get(name))
        elif what.strict and name not in excluded:
            problems.append(f"it has no weight {name!r}")
        master = f"{MASTER}/{name}"
        if master in checkpoint.optimizer:
            problems += _difference(master, checkpoint.optimizer[master], shape)
    if what.strict:
        problems += [
            f"this model has no weight {name!r}"
            for name in weights.names()
            if name not in shapes and name not in training.state.stored.others
        ]
    return problems


def _difference(
    name: str, stored: StoredTensor, shape: tuple[int, ...], own: torch.Tensor | None = None
) -> list[str]:
    """What is wrong with a tensor that must have `shape`; its precision may differ from ours."""
    if stored.shape != shape:
        return [f"{name!r} has shape {list(stored.shape)}, in this model {list(shape)}"]
    floating = own is None or own.is_floating_point()
    if floating == stored.dtype.is_floating_point and (floating or own.dtype is stored.dtype):  # type: ignore[union-attr]
        return []
    return [f"{name!r} has dtype {stored.dtype}"]


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
        for key in keys:
            if key in checkpoint.optimizer:
                problems += _difference(key, checkpoint.optimizer[key], member.shape)
            else:
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


def groups_of(training: Training, state: dict[str, Any]) -> list[dict[str, Any]]:
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


def counters_of(
    training: Training, state: dict[str, Any], progress: dict[str, list[Progress]], what: What
) -> Counters:
    """The counters to go on with.

    Where gradients are accumulated over another number of micro-batches than before, or those that
    were saved are not taken over, the accumulation begins anew.

    Raises:
        CheckpointError: there are gradients, and the accumulation is over another number.
    """
    if not what.progress:
        return training.counters
    saved = field(state, "counters", dict)
    steps, micro = count(saved, "global_steps"), count(saved, "micro_steps")
    before, now = count(saved, "accumulation_steps"), training.counters.accumulation_steps
    pending = any(part.gradient for entries in progress.values() for part in entries)
    if what.optimizer and before != now and pending:
        raise CheckpointError(
            f"the checkpoint was saved in the middle of an accumulation over {before} "
            f"micro-batches, and this run accumulates over {now}; use {before} until the next "
            "step, or load an older checkpoint"
        )
    if before != now or not what.optimizer:
        micro = steps * now
    return Counters(steps, micro, count(saved, "skipped_steps"), now)
