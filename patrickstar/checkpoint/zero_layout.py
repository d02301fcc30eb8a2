"""Where ZeRO has put the elements of each parameter.

Stages 1 and 2 flatten the parameters of a group one after the other, pad, and give every process an
equal range of that: a parameter is a range of all processes' ranges put together. Stage 3 cuts
every parameter into equal parts, the last one padded, and every process flattens its parts, over
one or several flat tensors. (`deepspeed/utils/zero_to_fp32.py`, 0.19.8.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from patrickstar.checkpoint.pickled import PickledTensor
from patrickstar.errors import CheckpointError

Flats = Sequence[Sequence[PickledTensor]]
"""The flat tensors of every process: by process, then by group."""

Groups = Sequence[Mapping[str, Sequence[int]]]
"""The shapes of the parameters of every group, by name and in order."""


@dataclass(frozen=True)
class Range:
    """Elements `start` to `stop` of a flat tensor of one process."""

    flat: PickledTensor
    start: int
    stop: int


def whole(flat: PickledTensor) -> Range:
    """All of it."""
    return Range(flat, 0, flat.numel)


def cut(ranges: Sequence[Range], numel: int, offset: int = 0) -> list[Range]:
    """`numel` elements of consecutive ranges, from number `offset` on.

    Raises:
        CheckpointError: they are too short for that.
    """
    made, first, left = [], offset, numel
    for part in ranges:
        length = part.stop - part.start
        if first < length and left:
            taken = min(length - first, left)
            made.append(Range(part.flat, part.start + first, part.start + first + taken))
            left -= taken
        first = max(0, first - length)
    if left:
        raise CheckpointError(f"flat tensors are {left} elements too short")
    return made


def ranges_of_flat_groups(
    groups: Groups, flats: Flats, paddings: Sequence[Sequence[int]] | None
) -> dict[str, list[Range]]:
    """Stages 1 and 2: the elements of every parameter, in order.

    Args:
        paddings: elements between a parameter and the next, by group.
    """
    found = {}
    for index, group in enumerate(groups):
        gaps = [0] * len(group) if paddings is None else paddings[index]
        together, offset = [whole(process[index]) for process in flats], 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            numel = math.prod(shape)
            found[name] = cut(together, numel, offset)
            offset += numel + gap
    return found


def ranges_of_parts(groups: Groups, flats: Flats) -> dict[str, list[Range]]:
    """Stage 3: the elements of every parameter, in order."""
    found: dict[str, list[Range]] = {}
    world, offset = len(flats), 0
    together = [[whole(flat) for flat in process] for process in flats]
    for name, shape in ((n, s) for group in groups for n, s in group.items()):
        numel = math.prod(shape)
        part = -(-numel // world)
        found[name] = [
            piece
            for rank, process in enumerate(together)
            for piece in cut(process, max(0, min(part, numel - rank * part)), offset)
        ]
        offset += part
    return found
