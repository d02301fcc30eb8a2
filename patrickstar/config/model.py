"""The config as the rest of PatrickStar reads it."""

from __future__ import annotations

from typing import Literal

from patrickstar.config.activation_checkpointing import ActivationCheckpointing
from patrickstar.config.key import honoured
from patrickstar.config.memory import PatrickStar
from patrickstar.config.monitor import CsvMonitor, Tensorboard, Wandb
from patrickstar.config.named import Named
from patrickstar.config.precision import Bf16, DataTypes, Fp16, Precision, TorchAutocast
from patrickstar.config.types import (
    Bool,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
)
from patrickstar.config.zero import ZeroOptimization


class Config(Section):
    """A whole config: frozen, every value in its own type, the batch triple resolved."""

    train_batch_size: PositiveInt = honoured(1, "samples per optimizer step over all ranks")
    train_micro_batch_size_per_gpu: PositiveInt = honoured(1, "samples per forward on one rank")
    gradient_accumulation_steps: PositiveInt = honoured(1, "micro-batches per optimizer step")
    optimizer: Named | None = honoured(None, "the optimizer")
    scheduler: Named | None = honoured(None, "the learning-rate schedule")
    fp16: Fp16 = honoured(Fp16(), "fp16 and its loss scale")
    bf16: Bf16 = honoured(Bf16(), "bf16")
    data_types: DataTypes = honoured(DataTypes(), "dtypes of what is neither weight nor activation")
    torch_autocast: TorchAutocast = honoured(TorchAutocast(), "torch.autocast around the model")
    gradient_clipping: NonNegativeFloat = honoured(1.0, "largest global gradient norm; 0 is off")
    prescale_gradients: Bool = honoured(False, "divide gradients before they are reduced")
    gradient_predivide_factor: PositiveFloat = honoured(1.0, "the part of that division done first")
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = honoured(
        None, "dtype gradients are reduced in"
    )
    zero_optimization: ZeroOptimization = honoured(ZeroOptimization(), "ZeRO")
    activation_checkpointing: ActivationCheckpointing = honoured(
        ActivationCheckpointing(), "activation checkpointing"
    )
    steps_per_print: PositiveInt | None = honoured(None, "updates between progress reports")
    wall_clock_breakdown: Bool = honoured(False, "time forward, backward and step")
    tensorboard: Tensorboard = honoured(Tensorboard(), "TensorBoard")
    wandb: Wandb = honoured(Wandb(), "Weights & Biases")
    csv_monitor: CsvMonitor = honoured(CsvMonitor(), "CSV files")
    patrickstar: PatrickStar = honoured(PatrickStar(), "what DeepSpeed has no words for")

    @property
    def precision(self) -> Precision:
        """The dtype the model computes in."""
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def grad_accum_dtype(self) -> Literal["fp32", "fp16", "bf16"] | None:
        """The dtype gradients are accumulated in; None means the dtype of the parameters."""
        return self.data_types.grad_accum_dtype
