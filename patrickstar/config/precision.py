"""Which number formats the run computes in: fp16, bf16, data_types and torch_autocast."""

from __future__ import annotations

from typing import Literal

from patrickstar.config.key import honoured
from patrickstar.config.types import (
    Bool,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Str,
)

Precision = Literal["fp32", "bf16", "fp16"]


class Fp16(Section):
    """The ``fp16`` section."""

    enabled: Bool = honoured(False, "train in fp16 with loss scaling")
    auto_cast: Bool = honoured(False, "cast floating-point inputs of the model to fp16")
    loss_scale: NonNegativeFloat = honoured(0.0, "a static loss scale; 0 means dynamic")
    initial_scale_power: NonNegativeInt = honoured(16, "the first dynamic scale is 2 to this power")
    loss_scale_window: PositiveInt = honoured(
        1000, "updates without an overflow before the scale doubles"
    )
    hysteresis: PositiveInt = honoured(2, "overflows before the scale is halved")
    consecutive_hysteresis: Bool = honoured(
        False, "any update without an overflow makes the hysteresis full again"
    )
    min_loss_scale: PositiveFloat = honoured(1.0, "the smallest dynamic scale")


class Bf16(Section):
    """The ``bf16`` section."""

    enabled: Bool = honoured(False, "train in bf16")


class DataTypes(Section):
    """The ``data_types`` section."""

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = honoured(
        None, "the dtype gradients are accumulated in"
    )


class TorchAutocast(Section):
    """The ``torch_autocast`` section."""

    enabled: Bool = honoured(False, "run the model under torch.autocast")
    dtype: Str | None = honoured(None, "bfloat16 or float16")
    lower_precision_safe_modules: tuple[Str, ...] | None = honoured(
        None, "modules that are autocast"
    )
