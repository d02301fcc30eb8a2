"""``scheduler``: how the learning rate changes from update to update."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator

from patrickstar.config.key import UNSET, Key
from patrickstar.config.named import Named, absent, parameter
from patrickstar.config.types import Bool, Float, Int, Str


class Scheduler(Named):
    """``scheduler``.

    Attributes:
        type: in its canonical spelling: one of `spellings`, or a class of
            `torch.optim.lr_scheduler`.
    """

    spellings: ClassVar[tuple[str, ...]] = (
        "LRRangeTest",
        "OneCycle",
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
    )


OptionalScheduler = Annotated[Scheduler | None, BeforeValidator(absent)]

_RATE = Float | tuple[Float, ...]
_WARMUP = "WarmupLR, WarmupDecayLR"
_ALL_WARMUP = "WarmupLR, WarmupDecayLR, WarmupCosineLR"

OTHER_KEYS: tuple[Key, ...] = (
    parameter("scheduler.params.warmup_min_lr", _RATE, 0.0, "rate at the start", _WARMUP),
    parameter(
        "scheduler.params.warmup_max_lr",
        _RATE | None,
        None,
        "rate after the warm-up",
        "WarmupLR: null is the optimizer's; WarmupDecayLR: 0.001",
    ),
    parameter(
        "scheduler.params.warmup_num_steps", Int, 1000, "updates of the warm-up", _ALL_WARMUP
    ),
    parameter("scheduler.params.warmup_type", Str, "log", "log or linear", _ALL_WARMUP),
    parameter(
        "scheduler.params.total_num_steps",
        Int,
        UNSET,
        "updates of the whole run",
        "WarmupDecayLR and WarmupCosineLR, which need it",
    ),
    parameter(
        "scheduler.params.warmup_min_ratio",
        Float,
        0.0,
        "rate at the start, as a part of the optimizer's",
        "WarmupCosineLR",
    ),
    parameter(
        "scheduler.params.cos_min_ratio",
        Float,
        0.0001,
        "rate at the end, as a part of the optimizer's",
        "WarmupCosineLR",
    ),
    parameter("scheduler.params.cycle_min_lr", _RATE, UNSET, "lowest rate", "OneCycle needs it"),
    parameter("scheduler.params.cycle_max_lr", _RATE, UNSET, "highest rate", "OneCycle needs it"),
    parameter("scheduler.params.decay_lr_rate", Float, 0.0, "decay after the cycle", "OneCycle"),
    parameter(
        "scheduler.params.cycle_first_step_size", Int, 2000, "updates of the rise", "OneCycle"
    ),
    parameter(
        "scheduler.params.cycle_second_step_size",
        Int | None,
        None,
        "updates of the fall; null: as many as of the rise",
        "OneCycle",
    ),
    parameter("scheduler.params.cycle_first_stair_count", Int, 0, "stairs of the rise", "OneCycle"),
    parameter(
        "scheduler.params.cycle_second_stair_count",
        Int | None,
        None,
        "stairs of the fall; null: as many as of the rise",
        "OneCycle",
    ),
    parameter(
        "scheduler.params.decay_step_size", Int, 0, "updates of one decay; 0: none", "OneCycle"
    ),
    parameter("scheduler.params.cycle_momentum", Bool, True, "cycle the momentum too", "OneCycle"),
    parameter("scheduler.params.cycle_min_mom", _RATE, 0.8, "lowest momentum", "OneCycle"),
    parameter("scheduler.params.cycle_max_mom", _RATE, 0.9, "highest momentum", "OneCycle"),
    parameter("scheduler.params.decay_mom_rate", Float, 0.0, "decay of the momentum", "OneCycle"),
    parameter("scheduler.params.lr_range_test_min_lr", _RATE, 1e-3, "first rate", "LRRangeTest"),
    parameter(
        "scheduler.params.lr_range_test_step_size", Int, 2000, "updates of a stair", "LRRangeTest"
    ),
    parameter(
        "scheduler.params.lr_range_test_step_rate", Float, 1.0, "rise of a stair", "LRRangeTest"
    ),
    parameter(
        "scheduler.params.lr_range_test_staircase", Bool, False, "rise in stairs", "LRRangeTest"
    ),
    parameter(
        "scheduler.params.last_batch_iteration",
        Int,
        -1,
        "position to start from; -1 is the beginning",
        "all of DeepSpeed's",
    ),
)
