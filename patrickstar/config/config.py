"""What a loaded config is: frozen, complete, every value of its type and in its range."""

from __future__ import annotations

from typing import Literal

from patrickstar.config.key import honoured
from patrickstar.config.memory import PatrickStar
from patrickstar.config.named import Named
from patrickstar.config.precision import Bf16, DataTypes, Fp16, Precision, TorchAutocast
from patrickstar.config.types import Bool, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class Config(Section):
    """A whole config, as `patrickstar.config.load_config` returns it."""

    train_batch_size: PositiveInt = honoured(1, "samples per update over all ranks")
    train_micro_batch_size_per_gpu: PositiveInt = honoured(1, "samples per forward and rank")
    gradient_accumulation_steps: PositiveInt = honoured(1, "micro-batches per update")
    gradient_clipping: NonNegativeFloat = honoured(1.0, "largest global gradient norm; 0 is off")
    optimizer: Named | None = honoured(None, "the optimizer")
    scheduler: Named | None = honoured(None, "the learning-rate schedule")
    fp16: Fp16 = honoured(Fp16(), "mixed precision in fp16")
    bf16: Bf16 = honoured(Bf16(), "mixed precision in bf16")
    data_types: DataTypes = honoured(DataTypes(), "dtypes of other state")
    torch_autocast: TorchAutocast = honoured(TorchAutocast(), "torch.autocast")
    prescale_gradients: Bool = honoured(False, "divide gradients before they are reduced")
    gradient_predivide_factor: PositiveFloat = honoured(1.0, "by this factor before reducing")
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = honoured(
        None, "dtype gradients are reduced in"
    )
    steps_per_print: PositiveInt | None = honoured(None, "print progress every so many updates")
    wall_clock_breakdown: Bool = honoured(False, "time forward, backward and step")
    patrickstar: PatrickStar = honoured(PatrickStar(), "our own section")

    @property
    def precision(self) -> Precision:
        """The format of parameters and of most arithmetic."""
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def grad_accum_dtype(self) -> Literal["fp32", "fp16", "bf16"] | None:
        """The dtype gradients are accumulated in; None means that of `precision`."""
        return self.data_types.grad_accum_dtype
