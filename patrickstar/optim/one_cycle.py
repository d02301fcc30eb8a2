"""DeepSpeed's OneCycle schedule: one cycle of the rate and, against it, of momentum; then a decay.

Smith, "A disciplined approach to neural network hyper-parameters: part 1", section 4; formulas of
``deepspeed/runtime/lr_schedules.py`` (0.19.8), class OneCycle. As there, the second beta of every
group becomes 0.99 when momentum is cycled.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from patrickstar.errors import ConfigError
from patrickstar.optim.schedule import HasParamGroups, Schedule

_SECOND_BETA = 0.99


class OneCycle(Schedule):
    """The rate goes up from `cycle_min_lr` to `cycle_max_lr` and back, then decays.

    Momentum (the first beta) goes down from `cycle_max_mom` to `cycle_min_mom` and back.

    Args:
        cycle_first_step_size: steps of the first half; greater than 0.
        cycle_second_step_size: steps of the second half; None means as many.
        cycle_first_stair_count: stairs of the first half; 0 for a smooth line.
        cycle_second_stair_count: stairs of the second half; None means as many.
        decay_step_size: steps of a decay interval after the cycle; 0 means no decay.
        decay_lr_rate: after n intervals the rate is ``cycle_min_lr / (1 + decay_lr_rate * n)``.
        decay_mom_rate: after n intervals momentum is ``cycle_max_mom * (1 + decay_mom_rate * n)``.
        cycle_momentum: whether momentum is cycled; only where the groups have ``betas``.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if cycle_second_step_size is None:
            cycle_second_step_size = cycle_first_step_size
        if cycle_first_step_size <= 0:
            raise ConfigError(f"cycle_first_step_size={cycle_first_step_size!r} must be positive")
        if cycle_second_step_size < 0:
            raise ConfigError(f"cycle_second_step_size={cycle_second_step_size!r} is negative")
        self.first_step_size = float(cycle_first_step_size)
        self.second_step_size = float(cycle_second_step_size)
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count
            if cycle_second_stair_count is None
            else cycle_second_stair_count
        )
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        self.min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and not all("betas" in group for group in optimizer.param_groups):
            warnings.warn(
                "cycle_momentum has no effect: the optimizer has no betas; set it to false",
                stacklevel=2,
            )
            self.cycle_momentum = False
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
            self._set_momentum(self.min_moms)

    def get_lr(self) -> list[float]:
        """The rate of each group at the present position."""
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [
                low + (high - low) * scale
                for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
            ]
        if self._is_off(self.decay_lr_rate):
            return self.min_lrs
        factor = 1 + self.decay_lr_rate * self._intervals()
        return [rate / factor for rate in self.min_lrs]

    def get_mom(self) -> list[float] | None:
        """The first beta of each group at the present position; None if it is not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [
                high - (high - low) * scale
                for low, high in zip(self.min_moms, self.max_moms, strict=True)
            ]
        if self._is_off(self.decay_mom_rate):
            return self.max_moms
        factor = 1 + self.decay_mom_rate * self._intervals()
        return [momentum * factor for momentum in self.max_moms]

    def step(self, batch_iteration: int | None = None) -> None:
        """Move on by one position, or to the one given, and set rates and momentum."""
        super().step(batch_iteration)
        momentum = self.get_mom()
        if momentum is not None:
            self._set_momentum(momentum)

    def _set_momentum(self, momentum: list[float]) -> None:
        if self.cycle_momentum:
            for group, beta in zip(self.optimizer.param_groups, momentum, strict=True):
                group["betas"] = (beta, _SECOND_BETA)

    def _scale(self) -> float:
        """How far from the low to the high rate the cycle is."""
        iteration = self.last_batch_iteration + 1
        cycle = math.floor(1 + iteration / self.total_size)
        x = 1.0 + iteration / self.total_size - cycle
        if x <= self.step_ratio:
            scale, stairs = x / self.step_ratio, self.first_stair_count
        else:
            scale, stairs = (x - 1) / (self.step_ratio - 1), self.second_stair_count
        if stairs > 0:
            # From the whole number of steps: at a stair's edge `scale` may lie just below it.
            inside = iteration % self.total_size
            if inside <= self.first_step_size:
                position = inside * stairs / self.first_step_size
            else:
                position = (self.total_size - inside) * stairs / self.second_step_size
            scale = math.floor(position) / stairs
        return scale

    def _is_off(self, rate: float) -> bool:
        return math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0)

    def _intervals(self) -> float:
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size
