"""Which number formats a run computes in: fp16, bf16, data_types and torch_autocast."""

from __future__ import annotations

from typing import Any, Literal

from patrickstar.config.key import Key, accepted, honoured, rejected, renamed
from patrickstar.config.types import (
    Bool,
    DType,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Str,
)
from patrickstar.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]


class Fp16(Section):
    """``fp16``."""

    enabled: Bool = honoured(False, "train in fp16, with fp32 master weights and a loss scale")
    auto_cast: Bool | None = honoured(
        None,
        "cast floating-point inputs of the model to fp16",
        deepspeed=False,
        note="inputs are cast unless it is false, as those of bf16 always are",
    )
    loss_scale: NonNegativeFloat = honoured(
        0.0, "a static loss scale; 0 makes it dynamic", deepspeed=0
    )
    initial_scale_power: NonNegativeInt = honoured(16, "the first dynamic scale is 2 to this power")
    loss_scale_window: PositiveInt = honoured(
        1000, "updates without an overflow before the scale doubles"
    )
    hysteresis: PositiveInt = honoured(2, "overflows before the scale is halved")
    consecutive_hysteresis: Bool = honoured(
        False, "any update without an overflow makes the hysteresis full again"
    )
    min_loss_scale: PositiveFloat = honoured(1.0, "the smallest dynamic scale", deepspeed=1)


class Bf16(Section):
    """``bf16``."""

    enabled: Bool = honoured(False, "train in bf16, with fp32 master weights")
    check_grad_overflow: Bool = honoured(
        True, "skip the update when a gradient is infinite or not a number"
    )


class DataTypes(Section):
    """``data_types``."""

    grad_accum_dtype: DType | None = honoured(
        None, "what gradients are accumulated in; null is the dtype of the parameters"
    )
    param_dtype: DType | None = honoured(
        None, "must be the precision that fp16 or bf16 choose", note="checked, as in DeepSpeed"
    )


class TorchAutocast(Section):
    """``torch_autocast``."""

    enabled: Bool = honoured(False, "run the model under `torch.autocast`")
    dtype: DType | None = honoured(
        None,
        "what autocast computes in",
        note="null is bf16; fp16 is refused, since the section `fp16` has the loss scale",
    )
    lower_precision_safe_modules: tuple[Str, ...] | None = honoured(
        None,
        "module classes whose gradients travel between ranks in that dtype",
        note="null is `torch.nn.Linear` and the convolutions, as in DeepSpeed; weights travel as "
        "they are, since autocast rounds them where they are used",
    )


OTHER_KEYS: tuple[Key, ...] = (
    rejected(
        "fp16.fp16_master_weights_and_grads",
        Bool,
        False,
        "keep master weights and gradients in fp16",
        "master weights are fp32; give `patrickstar.memory` smaller budgets instead",
    ),
    renamed("bfloat16", Any, None, "bf16", "mixed precision in bf16"),
    accepted(
        "bf16.immediate_grad_update",
        Bool,
        False,
        "add gradients to the accumulation buffer in each backward",
        "gradients are always accumulated as they come",
    ),
    rejected(
        "bf16.bf16_master_weights_and_grads",
        Bool,
        False,
        "keep master weights and gradients in bf16",
        "master weights are fp32; give `patrickstar.memory` smaller budgets instead",
    ),
    rejected(
        "bf16.bf16_optimizer_states",
        Bool,
        False,
        "keep optimizer states in bf16",
        "optimizer states are fp32; give `patrickstar.memory` smaller budgets instead",
    ),
    rejected(
        "data_types.buffer_dtype",
        DType | None,
        None,
        "what buffers of the model are cast to",
        "buffers are cast as by `module.to(dtype)`; cast them again after initialisation",
    ),
    rejected(
        "data_types.keep_in_fp32_modules",
        Any,
        "auto",
        "patterns of buffers that stay in fp32",
        "buffers are cast as by `module.to(dtype)`; cast them back after initialisation",
        harmless=("auto", [], None),
    ),
)


def check(fp16: Fp16, bf16: Bf16, data_types: DataTypes) -> None:
    """Raise `ConfigError` where the sections contradict each other."""
    if fp16.enabled and bf16.enabled:
        raise ConfigError(
            "fp16.enabled and bf16.enabled are both true; a run has one precision, turn one off"
        )
    chosen = "fp16" if fp16.enabled else "bf16" if bf16.enabled else "fp32"
    if data_types.param_dtype not in (None, chosen):
        raise ConfigError(
            f"data_types.param_dtype is {data_types.param_dtype!r}, but the run's precision is "
            f"{chosen!r}; enable the section of that name, or leave param_dtype out"
        )
