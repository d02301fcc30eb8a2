"""Loss scales for fp16: static, and dynamic with DeepSpeed's window and hysteresis.

Micikevicius et al., "Mixed precision training", section 3.2; the rules are those of
`deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler` (0.19.8):

* An overflow halves the scale, but not below ``min_scale``, once `hysteresis` overflows have been
  seen (the first ``hysteresis - 1`` only use the hysteresis up).
* After every `window` updates in a row without an overflow the scale doubles and the hysteresis is
  full again. With `consecutive_hysteresis` it is full again after any update without an overflow.
* An overflow at ``min_scale`` is an error: the run cannot go on.

DeepSpeed changes the scale *before* it unscales the gradients of the same step, so in the step in
which the scale doubles, its gradients come out half as large. `settle` returns the scale that the
loss was really multiplied by, and the changed one only with `deepspeed_exact`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from patrickstar.errors import CheckpointError, ConfigError, PatrickStarError


class LossScaleError(PatrickStarError, ArithmeticError):
    """Gradients overflow even with the smallest loss scale allowed."""


class LossScale(Protocol):
    """What multiplies the loss, and learns from whether the gradients overflowed."""

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by."""
        ...

    def update_scale(self, overflow: bool) -> None:
        """Count an optimizer step."""
        ...

    def settle(self, overflow: bool) -> float | None:
        """Count an optimizer step; the scale to divide its gradients by, None to skip it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        ...


@dataclass(slots=True)
class StaticLossScale:
    """A scale that stays. Steps whose gradients overflow are skipped all the same.

    Args:
        scale: what losses are multiplied by; greater than 0.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        _require(self.scale > 0, "loss_scale", self.scale, "a number greater than 0")

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by."""
        return self.scale

    def update_scale(self, overflow: bool) -> None:
        """Nothing changes."""

    def settle(self, overflow: bool) -> float | None:
        """The scale; None on overflow."""
        return None if overflow else self.scale

    def state_dict(self) -> dict[str, Any]:
        """The scale."""
        return {"cur_scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the scale."""
        self.scale = float(_get(state, "cur_scale"))


@dataclass(slots=True)
class DynamicLossScale:
    """A scale that rides the edge of overflow.

    The arguments are the keys of DeepSpeed's ``fp16`` section, with its defaults.

    Args:
        initial_scale_power: the first scale is 2 to this power.
        loss_scale_window: updates without an overflow before the scale doubles.
        hysteresis: overflows before the scale is halved.
        consecutive_hysteresis: any update without an overflow makes the hysteresis full again.
        min_loss_scale: the smallest scale.
        deepspeed_exact: unscale with the changed scale; see the module's docstring.
    """

    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0
    deepspeed_exact: bool = False
    cur_scale: float = field(init=False)
    cur_iter: int = field(init=False, default=0)
    last_overflow_iter: int = field(init=False, default=-1)
    cur_hysteresis: int = field(init=False)

    def __post_init__(self) -> None:
        power = self.initial_scale_power
        _require(0 <= power <= 127, "initial_scale_power", power, "an integer from 0 to 127")
        window = self.loss_scale_window
        _require(window >= 1, "loss_scale_window", window, "an integer of at least 1")
        _require(self.hysteresis >= 1, "hysteresis", self.hysteresis, "an integer of at least 1")
        least = self.min_loss_scale
        _require(least > 0, "min_loss_scale", least, "a number greater than 0")
        self.cur_scale = float(2**power)
        self.cur_hysteresis = self.hysteresis

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by."""
        return self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Count an optimizer step, and change the scale if it is time.

        Raises:
            LossScaleError: overflow at the smallest scale.
        """
        if overflow:
            self._shrink()
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.hysteresis
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % self.loss_scale_window == 0:
                self.cur_hysteresis = self.hysteresis
                self.cur_scale *= 2.0
        self.cur_iter += 1

    def settle(self, overflow: bool) -> float | None:
        """Count an optimizer step.

        Returns:
            the scale to divide this step's gradients by; None if the step must be skipped.

        Raises:
            LossScaleError: overflow at the smallest scale.
        """
        scale = self.cur_scale
        self.update_scale(overflow)
        if overflow:
            return None
        return self.cur_scale if self.deepspeed_exact else scale

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, under DeepSpeed's names."""
        return {
            "cur_scale": self.cur_scale,
            "cur_iter": self.cur_iter,
            "last_overflow_iter": self.last_overflow_iter,
            "cur_hysteresis": self.cur_hysteresis,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint.

        Raises:
            CheckpointError: a key is missing.
        """
        self.cur_scale = float(_get(state, "cur_scale"))
        self.cur_iter = int(_get(state, "cur_iter"))
        self.last_overflow_iter = int(_get(state, "last_overflow_iter"))
        self.cur_hysteresis = int(state.get("cur_hysteresis", self.hysteresis))

    def _shrink(self) -> None:
        if self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
            return
        if self.cur_scale == self.min_loss_scale:
            raise LossScaleError(
                f"gradients overflow at the smallest loss scale, min_loss_scale="
                f"{self.min_loss_scale}; look for NaN or Inf in the model or its data, lower the "
                "learning rate, or train in bf16"
            )
        self.cur_scale = max(self.cur_scale / 2.0, self.min_loss_scale)


def make_loss_scale(loss_scale: float = 0.0, **dynamic: Any) -> LossScale:
    """The loss scale of a DeepSpeed ``fp16`` section.

    Args:
        loss_scale: a static scale; 0 means dynamic.
        dynamic: arguments of `DynamicLossScale`; they have no effect on a static scale.
    """
    _require(loss_scale >= 0, "loss_scale", loss_scale, "0 for a dynamic scale or a positive one")
    return StaticLossScale(loss_scale) if loss_scale else DynamicLossScale(**dynamic)


def _require(ok: bool, key: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"fp16: {key}={value!r} is out of range, use {expected}")


def _get(state: dict[str, Any], key: str) -> Any:
    if key not in state:
        raise CheckpointError(f"the loss scale in the checkpoint has no {key!r}: {sorted(state)}")
    return state[key]
