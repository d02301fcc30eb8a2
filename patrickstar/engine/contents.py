"""What a run consists of, by the names of the user's module.

How its tensors lie in chunks, on which tier, and whether they are kept in pieces, is the business
of one run; a checkpoint knows parameters, whole and by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patrickstar.checkpoint.progress import Progress
from patrickstar.engine.aligned import AlignedChunks, Slot
from patrickstar.engine.gradients import Gradients
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.engine.parameter import ManagedParameter
from patrickstar.engine.pieces import PiecedParameter
from patrickstar.engine.precision import Precision
from patrickstar.engine.segments import Segments
from patrickstar.engine.state import ModelState
from patrickstar.engine.stepping import Stepping
from patrickstar.errors import CheckpointError

MASTER, GRADIENT = "master", "gradient"


@dataclass
class Counters:
    """How far the run is."""

    global_steps: int
    micro_steps: int
    skipped_steps: int
    accumulation_steps: int


@dataclass(frozen=True)
class Training:
    """The parts of a run that a checkpoint is made of.

    Attributes:
        data: what knows the position in the data, by `state_dict` and `load_state_dict`, if
            anything does.
    """

    module: nn.Module
    state: ModelState
    gradients: Gradients
    segments: Segments
    precision: Precision
    optimizer: ChunkedOptimizer
    stepping: Stepping
    counters: Counters
    data: Any | None = None


@dataclass(frozen=True)
class Part:
    """Rows of a parameter that have a place in chunks; elements are counted from `first` on."""

    rows: tuple[int, int]
    first: int
    aligned: AlignedChunks
    slot: Slot

    def progress(self) -> Progress:
        aligned, slot = self.aligned, self.slot
        rows = self.rows[1] - self.rows[0]
        trained = aligned.gradient is not None
        return Progress(
            rows,
            slot.step,
            trained and aligned.started,
            trained and aligned.changed and aligned.master is not None,
            slot.has_grad,
        )


@dataclass(frozen=True)
class Member:
    """A parameter of the model with its places in chunks, in order; named as in checkpoints."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def alone(self) -> bool:
        """Whether this rank has it for itself."""
        return self.parts[0].aligned.alone


def members(training: Training) -> list[Member]:
    """All parameters that live in chunks, in the order of the chunks; tied ones once."""
    order = {id(aligned): index for index, aligned in enumerate(training.state.aligned)}
    found = []
    for name, parameter in training.module.named_parameters():
        if isinstance(parameter, PiecedParameter):
            rows = list(parameter.rows())
        elif type(parameter) is ManagedParameter:
            rows = [(0, parameter.shape[0] if parameter.dim() else 1, parameter)]
        else:
            continue
        shape = tuple(parameter.shape)
        width = torch.Size(shape[1:]).numel()
        parts = tuple(
            Part((start, stop), start * width, *training.state.of(piece))
            for start, stop, piece in rows
        )
        found.append(Member(training.state.stored.of(name), shape, parts))
    return sorted(found, key=lambda m: (order[id(m.parts[0].aligned)], m.parts[0].slot.offset))


def other_tensors(training: Training) -> dict[str, torch.Tensor]:
    """What of the model's state lives in no chunk: persistent buffers, parameters of other kinds.

    Raises:
        CheckpointError: one of them is no plain tensor.
    """
    found: dict[str, torch.Tensor] = {
        name: parameter.detach()
        for name, parameter in training.module.named_parameters()
        if not isinstance(parameter, ManagedParameter | PiecedParameter)
    }
    seen: set[int] = set()
    for prefix, owner in training.module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or name in owner._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[f"{prefix}.{name}" if prefix else name] = buffer.detach()
    for name, tensor in found.items():
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"{name!r} is a {type(tensor).__name__} of layout {tensor.layout}, which a "
                "checkpoint cannot hold; save it on its own"
            )
    return {training.state.stored.of(name): tensor for name, tensor in found.items()}
