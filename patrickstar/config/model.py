"""The config as the rest of PatrickStar reads it."""

from __future__ import annotations

from typing import Literal

from patrickstar.config.activation_checkpointing import ActivationCheckpointing
from patrickstar.config.checkpoint import Checkpoint
from patrickstar.config.key import honoured
from patrickstar.config.memory import PatrickStar
from patrickstar.config.monitor import CsvMonitor, Tensorboard, Wandb
from patrickstar.config.optimizer import OptionalOptimizer
from patrickstar.config.precision import Bf16, DataTypes, Fp16, Precision, TorchAutocast
from patrickstar.config.scheduler import OptionalScheduler
from patrickstar.config.types import (
    Bool,
    DType,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
)
from patrickstar.config.zero import ZeroOptimization


class Config(Section):
    """A whole config: frozen, every value of its type, the batch triple resolved."""

    train_batch_size: PositiveInt = honoured(
        1,
        "samples per update over all ranks",
        deepspeed=None,
        note="any two of the three give the third; DeepSpeed insists on one batch size, here none "
        "is a micro-batch of 1",
    )
    train_micro_batch_size_per_gpu: PositiveInt = honoured(
        1, "samples per forward on one rank", deepspeed=None
    )
    gradient_accumulation_steps: PositiveInt = honoured(
        1, "micro-batches per update", deepspeed=None
    )
    optimizer: OptionalOptimizer = honoured(
        None,
        "what updates the weights",
    )
    scheduler: OptionalScheduler = honoured(None, "how the learning rate changes")
    fp16: Fp16 = honoured(Fp16(), "mixed precision in fp16")
    bf16: Bf16 = honoured(Bf16(), "mixed precision in bf16")
    data_types: DataTypes = honoured(DataTypes(), "dtypes of gradients, parameters and buffers")
    torch_autocast: TorchAutocast = honoured(TorchAutocast(), "mixed precision by `torch.autocast`")
    gradient_clipping: NonNegativeFloat = honoured(
        1.0, "largest global gradient norm; 0 turns clipping off", note="1.0 since 2026, 0 before"
    )
    prescale_gradients: Bool = honoured(
        False, "divide gradients by the number of ranks before they are reduced"
    )
    gradient_predivide_factor: PositiveFloat = honoured(
        1.0, "divide by this factor before reducing, and by the rest after it"
    )
    communication_data_type: DType | None = honoured(
        None,
        "dtype gradients are reduced in; null: what they are accumulated in",
        note="DeepSpeed's null is the dtype of the parameters, with which gradients that are "
        "accumulated in fp32 travel in half the bytes, rounded; so it is under `deepspeed_exact`",
    )
    zero_optimization: ZeroOptimization = honoured(
        ZeroOptimization(),
        "what data parallelism shards, and what may leave the device",
        note="`true` and `false`, from the first ZeRO, mean stage 1 and 0",
    )
    activation_checkpointing: ActivationCheckpointing = honoured(
        ActivationCheckpointing(), "what checkpointed regions keep"
    )
    checkpoint: Checkpoint = honoured(Checkpoint(), "how checkpoints are written and read")
    dataloader_drop_last: Bool = honoured(False, "drop a last batch that is not full")
    steps_per_print: PositiveInt | None = honoured(
        None,
        "updates between two progress lines; null: none",
        note='logged with level INFO under the name "patrickstar", with samples a second',
    )
    wall_clock_breakdown: Bool = honoured(
        False,
        "print the times of forward, backward and update",
        note="an update that the planner leaves to the next forward counts there; "
        "`patrickstar.overlap_update` false makes it part of the step",
    )
    tensorboard: Tensorboard = honoured(Tensorboard(), "metrics to TensorBoard")
    wandb: Wandb = honoured(Wandb(), "metrics to Weights & Biases")
    csv_monitor: CsvMonitor = honoured(CsvMonitor(), "metrics to CSV files")
    patrickstar: PatrickStar = honoured(PatrickStar(), "what DeepSpeed has no words for")

    @property
    def precision(self) -> Precision:
        """What parameters are kept in and most arithmetic is done in."""
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def grad_accum_dtype(self) -> Literal["fp32", "fp16", "bf16"] | None:
        """What gradients are accumulated in; None means the dtype of the parameters."""
        return self.data_types.grad_accum_dtype
