"""The batch triple: ``train_batch_size = micro batch x accumulation steps x world size``.

As in DeepSpeed, any two of the three give the third, and one of the two batch sizes alone is
enough. Unlike DeepSpeed, none at all is a micro-batch of 1: the engine takes whatever batch it is
called with, and configs of the original PatrickStar have no batch keys.
"""

from __future__ import annotations

from typing import NamedTuple

from patrickstar.errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
NAMES = (TRAIN, MICRO, STEPS)


class Batch(NamedTuple):
    """Samples per update, samples per forward and rank, forwards per update."""

    train: int
    micro: int
    steps: int


def resolve(train: int | None, micro: int | None, steps: int | None, world_size: int) -> Batch:
    """Fill in what is not given.

    Args:
        train: samples per optimizer step over all ranks.
        micro: samples per forward on one rank.
        steps: micro-batches per optimizer step.
        world_size: data-parallel ranks.

    Raises:
        ConfigError: the three contradict each other, or the rest cannot be whole numbers.
    """
    if world_size < 1:
        raise ConfigError(f"world_size={world_size} must be at least 1")
    for name, value in zip(NAMES, (train, micro, steps), strict=True):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; expected a number greater than 0")
    if train is None:
        steps = steps or 1
        micro = micro or 1
        return Batch(micro * steps * world_size, micro, steps)
    if micro is None:
        steps = steps or 1
        micro = _divide(train, (STEPS, steps), world_size, MICRO)
    elif steps is None:
        steps = _divide(train, (MICRO, micro), world_size, STEPS)
    if train != micro * steps * world_size:
        raise ConfigError(
            f"{TRAIN} ({train}) is not {MICRO} ({micro}) x {STEPS} ({steps}) x world size "
            f"({world_size}) = {micro * steps * world_size}; leave one of the three out and it is "
            "filled in"
        )
    return Batch(train, micro, steps)


def _divide(train: int, by: tuple[str, int], world_size: int, wanted: str) -> int:
    name, value = by
    quotient, rest = divmod(train, value * world_size)
    if rest or not quotient:
        raise ConfigError(
            f"{wanted} cannot be filled in: {TRAIN} ({train}) is no multiple of {name} ({value}) x "
            f"world size ({world_size}) = {value * world_size}"
        )
    return quotient
