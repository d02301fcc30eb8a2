"""DeepSpeed's learning-rate schedules: its names, parameters, formulas and checkpoints.

They work on anything with ``param_groups`` and have the interface of a scheduler of
`torch.optim.lr_scheduler`: ``step()`` after each optimizer step, ``get_last_lr()``,
``state_dict()``. The formulas are those of ``deepspeed/runtime/lr_schedules.py`` (0.19.8). A
schedule's position is `last_batch_iteration`, -1 before the first step.

Where they differ from DeepSpeed: an unknown ``warmup_type`` is an error instead of ``"log"``, and
`load_state_dict` restores `get_last_lr` and the groups as well as the position.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from patrickstar.errors import CheckpointError, ConfigError

T = TypeVar("T")


class HasParamGroups(Protocol):
    """What a schedule needs of an optimizer."""

    param_groups: list[dict[str, Any]]


class Schedule:
    """Common to all schedules; a subclass has the formula, `get_lr`.

    Args:
        optimizer: whose groups are changed.
        last_batch_iteration: position to continue from; -1 starts, and sets the first rate.
    """

    def __init__(self, optimizer: HasParamGroups, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr = [float(group["lr"]) for group in optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """The rate of each group at the present position."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rates that were set last, one for each group."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Move on by one position, or to the one given, and set rates."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position in a checkpoint and set its rates.

        Raises:
            CheckpointError: it has no position.
        """
        if "last_batch_iteration" not in state:
            raise CheckpointError(
                f"the schedule in the checkpoint has no 'last_batch_iteration': {sorted(state)}"
            )
        self.step(int(state["last_batch_iteration"]))

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = list(rates)

    def _per_group(self, value: T | Sequence[T], name: str) -> list[T]:
        count = len(self.optimizer.param_groups)
        if isinstance(value, list | tuple):
            if len(value) != count:
                raise ConfigError(f"{name} has {len(value)} values for {count} parameter groups")
            return list(value)
        return [value] * count  # type: ignore[list-item]


class LRRangeTest(Schedule):
    """Raises the rate steadily from `lr_range_test_min_lr`, to find where training diverges.

    Smith, "A disciplined approach to neural network hyper-parameters: part 1", section 4.1:
    ``lr = min_lr * (1 + step_rate * (t + 1) / step_size)``, in stairs if asked.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _positive(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._set(self.min_lr)

    def get_lr(self) -> list[float]:
        """The rate of each group at the present position."""
        interval = float(self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        increase = 1 + self.step_rate * interval
        return [rate * increase for rate in self.min_lr]


class WarmupLR(Schedule):
    """Raises the rate from `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps`, then keeps it.

    At position t the rate has come ``log(t + 1) / log(warmup_num_steps)`` of the way, or with
    ``warmup_type="linear"`` ``t / warmup_num_steps`` of it.

    Args:
        warmup_max_lr: None means the rates that the groups have.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = list(self._last_lr)
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._per_group(warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps = max(2, _positive(warmup_num_steps, "warmup_num_steps"))
        self._progress = _warmup(warmup_type, self.warmup_num_steps)
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[float]:
        """The rate of each group at the present position."""
        if self.last_batch_iteration < 0:
            return self.min_lrs
        gamma = self._gamma()
        return [
            low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return self._progress(self.last_batch_iteration)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a straight line down from `warmup_max_lr` to 0 at `total_num_steps`."""

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )
        _warn_if_short(total_num_steps, self.warmup_num_steps)

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return self._progress(self.last_batch_iteration)
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(Schedule):
    """Ratios of the groups' own rates: warm up, then half a cosine down to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_num_steps = max(2, _positive(warmup_num_steps, "warmup_num_steps"))
        self._progress = _warmup(warmup_type, self.warmup_num_steps)
        self.org_lrs = list(self._last_lr)
        _warn_if_short(total_num_steps, self.warmup_num_steps)
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[float]:
        """The rate of each group at the present position; 0 before the first step."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """What the groups' own rates are multiplied by at the present position."""
        position = self.last_batch_iteration
        if position < 0:
            return 0.0
        if position < self.warmup_num_steps:
            return self.warmup_min_ratio + self._progress(position) * (1.0 - self.warmup_min_ratio)
        done = position - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup_num_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


def _warmup(kind: str, steps: int) -> Callable[[int], float]:
    if kind == "log":
        inverse = 1.0 / math.log(steps)
        return lambda position: inverse * math.log(position + 1)
    if kind == "linear":
        return lambda position: position / steps
    raise ConfigError(f'warmup_type={kind!r} is unknown, use "log" or "linear"')


def _warn_if_short(total: int, warmup: int) -> None:
    if total < warmup:
        warnings.warn(
            f"total_num_steps={total} is less than warmup_num_steps={warmup}: training ends before "
            "the rate is reached",
            stacklevel=3,
        )


def _positive(value: int, name: str) -> int:
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{name}={value!r} must be a positive integer")
    return value
